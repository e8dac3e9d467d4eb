"""Metrics of a model's experts."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.request import ExpertStats


def expert_metrics(stats: ExpertStats, names: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[Metric]:
    """names, labels: what every series carries."""
    even = GaugeMetricFamily(
        "pageloom:expert_balancedness", "Mean over greatest load of the devices that share a layer's experts, lately",
        labels=(*names, "layer"),
    )  # fmt: skip
    for layer, value in zip(stats.layers, stats.balancedness, strict=True):
        even.add_metric((*labels, str(layer)), value)
    yield even
    moved = CounterMetricFamily("pageloom:expert_layers_moved", "Times that a layer's experts got new places",
                                labels=names)  # fmt: skip
    moved.add_metric(labels, stats.layers_moved)
    yield moved
    if stats.tokens:
        tokens = CounterMetricFamily("pageloom:expert_tokens", "Tokens that chose an expert",
                                     labels=(*names, "layer", "expert"))  # fmt: skip
        for layer, of_experts in zip(stats.layers, stats.tokens, strict=True):
            for expert, count in enumerate(of_experts):
                tokens.add_metric((*labels, str(layer), str(expert)), count)
        yield tokens
