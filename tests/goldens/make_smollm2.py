"""Makes smollm2_greedy.json with `transformers`: greedy outputs in f32 of the real default model.

    python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

`prompts`: prompt ids (with the text and messages they come from, if any) and the 64 ids that follow, end of sequence
ignored, with the margin between the two best logits of each step. A prompt whose smallest margin is under 1e-3 is
dropped: there, another order of summation may rightly choose the other token. `logprobs`: for a few of them, the chosen
token's log-probability and the best five at each output position. `prompt_logprobs`: the same for the prompt's own
tokens from the second one on.
"""

import json
import platform
import random
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
OUTPUT_LENGTH = 64
MIN_MARGIN = 1e-3
TOP = 5

RAW = {
    "capital": "The capital of France is",
    "once": "Once upon a time",
    "one-token": "The",
    "code": "def fibonacci(n):\n    ",
    "list": "The first ten prime numbers are 2, 3, 5,",
    "unicode": "Liebe Grüße aus München! Übersetzung: 你好世界 means",
    "json": '{"name": "Ada", "born": 1815, "fields": [',
    "recipe": "Ingredients for pancakes:\n- 2 eggs\n-",
    "sonnet": "Shall I compare thee to a summer's day?\n",
    "spaces": "   a   b    c\n\n\td",
}
STORY = (
    "The lighthouse keeper had lived alone on the island for eleven years. Every morning he climbed the hundred and "
    "forty steps to the lamp room, polished the great lens, and wrote the weather into a leather book. Ships passed "
    "far out, small as seeds, and he gave each of them a name of his own. In the winter of the twelfth year a storm "
    "came from the north that was unlike any storm before it. The waves reached the gallery, the windows broke, and "
    "for three nights he kept the lamp burning by hand, turning the heavy crank until his fingers bled. On the fourth "
    "morning the sea lay still and grey, and on the rocks below the tower he found a small boat, and in the boat "
    "a sleeping child wrapped in a sail. "
)
SHARED = {
    "shared-question": "Question: what did the keeper find? Answer:",
    "shared-next": "The keeper",
    "shared-year": "It was the year",
    "shared-dialogue": '"Who are you?" he asked. "',
    "shared-summary": "\n\nSummary of the story in one sentence:",
}
CHAT = {
    "chat-capital": ["What is the capital of France?"],
    "chat-haiku": ["Write a haiku about the sea."],
    "chat-math": ["What is 17 + 25? Answer with the number only."],
    "chat-turns": ["My name is Ada.", "Hello Ada! How can I help you?", "What is my name?"],
    "chat-story": [STORY + "\n\nWho is in the boat?"],
    "chat-translate": ["Translate to French: Good morning, my friend."],
    "chat-explain": ["Explain photosynthesis to a ten-year-old child."],
}
RANDOM_LENGTHS = {"random-2": 2, "random-17": 17, "random-32": 32, "random-100": 100, "random-257": 257}


def prompts(tokenizer) -> dict[str, dict]:
    """Name to prompt_token_ids, with the text they come from and the messages that come before that."""
    result = {name: {"text": text} for name, text in RAW.items()}
    result |= {name: {"text": STORY + text} for name, text in SHARED.items()}
    for name, turns in CHAT.items():
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        result[name] = {"messages": messages, "text": text}
    for prompt in result.values():
        prompt["prompt_token_ids"] = tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]
    generator = random.Random(0)
    for name, length in RANDOM_LENGTHS.items():
        result[name] = {"prompt_token_ids": [generator.randrange(100, 40000) for _ in range(length)]}
    return result


def top(logprobs: torch.Tensor, token: int) -> dict:
    values, ids = logprobs.topk(TOP)
    return {
        "token_id": token, "logprob": round(logprobs[token].item(), 5),
        "rank": int((logprobs > logprobs[token]).sum()) + 1,
        "top_ids": ids.tolist(), "top_logprobs": [round(value, 5) for value in values.tolist()],
    }


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    kept, dropped, logprobs, prompt_logprobs = [], {}, {}, {}
    for name, prompt in prompts(tokenizer).items():
        ids = prompt["prompt_token_ids"]
        tensor = torch.tensor([ids])
        with torch.inference_mode():
            # Without eos ids nothing stops or suppresses it: min_new_tokens alone would forbid the eos token.
            model.generation_config.eos_token_id = None
            output = model.generate(tensor, attention_mask=torch.ones_like(tensor), do_sample=False, pad_token_id=0,
                                    max_new_tokens=OUTPUT_LENGTH)[0].tolist()
            logits = model(torch.tensor([output])).logits[0]  # one pass over all, to check generate's cached steps
        new = output[len(ids) :]
        steps = logits[len(ids) - 1 : -1]
        best = steps.topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        text = tokenizer.decode(new)
        print(f"{name}: {len(ids)} tokens, smallest margin {min(margins):.4f}: {text[:80]!r}", flush=True)
        if min(margins) < MIN_MARGIN:
            dropped[name] = min(margins)
            continue
        assert len(new) == OUTPUT_LENGTH and steps.argmax(-1).tolist() == new, f"{name}: two passes disagree"
        kept.append({"name": name, **prompt, "output_token_ids": new, "output_text": text,
                     "margins": [round(margin, 4) for margin in margins]})
        table = torch.log_softmax(logits.double(), dim=-1)
        if name in ("capital", "chat-haiku", "random-32"):
            logprobs[name] = [top(row, token) for row, token in zip(table[len(ids) - 1 : -1], new, strict=True)]
        if name in ("capital", "shared-question"):
            prompt_logprobs[name] = [top(row, token) for row, token in zip(table, ids[1:], strict=False)]
    assert len(kept) >= 20
    result = {
        "model": path.name, "prompts": kept, "dropped_for_small_margin": dropped, "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }
    # One prompt or position a line: readable, and small.
    text = json.dumps(result, ensure_ascii=False)
    for start in ('{"name"', '{"token_id"'):
        text = text.replace(start, "\n" + start)
    (HERE / "smollm2_greedy.json").write_text(text + "\n")
    print(f"kept {len(kept)}, dropped {dropped}")


if __name__ == "__main__":
    main()
