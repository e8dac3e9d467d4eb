"""Which device holds which expert: replicas for busy experts, and devices that have about the same to do (EPLB).

The algorithm is DeepSeek's (github.com/deepseek-ai/EPLB). A placement names, for each of P places of a layer, the
expert whose weights lie there; places 0 .. P/n - 1 are those of the first of n devices, and so on. An expert with
several places shares its tokens among them evenly.

Axis letters: L layers, E experts, P places (replicas of experts), R most places of an expert.
"""

import numpy as np
from jaxtyping import Float, Int


def pack(weights: Float[np.ndarray, " I"], num_packs: int) -> Int[np.ndarray, "packs size"]:
    """Items in packs of equal size, of about equal weight: heavy items first, each into the lightest pack with room.

    num_packs must divide the number of items. Of equals the lower number comes first.
    """
    size, rest = divmod(len(weights), num_packs)
    if rest:
        raise ValueError(f"{len(weights)} items cannot be packed evenly into {num_packs=}")
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable"):
        lightest = int(np.argmin(total))
        packs[lightest].append(int(item))
        total[lightest] = total[lightest] + weights[item] if len(packs[lightest]) < size else np.inf
    return np.array(packs)


def replicate(load: Float[np.ndarray, " E"], num_places: int) -> Int[np.ndarray, " P"]:
    """Every expert once, in order, and then again and again the one with the most load for each of its replicas."""
    if num_places < len(load):
        raise ValueError(f"{num_places=} must be at least the {len(load)} experts")
    experts, count = list(range(len(load))), np.ones(len(load))
    for _ in range(num_places - len(load)):
        busiest = int(np.argmax(load / count))
        experts.append(busiest)
        count[busiest] += 1
    return np.array(experts)


def rebalance(load: Float[np.ndarray, "L E"], *, num_places: int, num_groups: int, num_nodes: int, num_devices: int
              ) -> Int[np.ndarray, "L P"]:  # fmt: skip
    """A placement for the loads of each layer.

    Where num_nodes divides num_groups, a group of experts (that a router chooses together) stays within a node: groups
    are packed to nodes, experts replicated within their node, replicas packed to its devices. Otherwise the devices
    are one node. Raises ValueError for what does not divide.
    """
    num_experts = load.shape[1]
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    for what, number, parts in (("places", num_places, num_devices), ("devices", num_devices, num_nodes),
                                ("experts", num_experts, num_groups)):
        if number % parts:
            raise ValueError(f"{number} {what} cannot be divided into {parts}")
    sizes = {"num_places": num_places, "num_groups": num_groups, "num_nodes": num_nodes, "num_devices": num_devices}
    return np.array([_of_layer(np.asarray(one, np.float64), **sizes) for one in load])


def _of_layer(load: np.ndarray, *, num_places: int, num_groups: int, num_nodes: int, num_devices: int) -> np.ndarray:
    group_size = len(load) // num_groups
    of_groups = load.reshape(num_groups, group_size).sum(1)
    places: list[int] = []
    for groups in pack(of_groups, num_nodes):
        experts = (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)
        replicas = replicate(load[experts], num_places // num_nodes)
        share = load[experts] / np.bincount(replicas)
        for device in pack(share[replicas], num_devices // num_nodes):
            places.extend(experts[replicas[device]])
    return np.array(places)


def first_placement(num_layers: int, num_experts: int, num_places: int) -> Int[np.ndarray, "L P"]:
    """Before anything is known: the experts in order, and then from the first one again."""
    return np.tile(np.arange(num_places) % num_experts, (num_layers, 1))


def keep_in_place(old: Int[np.ndarray, " P"], new: Int[np.ndarray, " P"], num_devices: int, num_nodes: int = 1
                  ) -> Int[np.ndarray, " P"]:  # fmt: skip
    """`new` with a node's devices swapped among themselves, and the places within each, so that few weights move."""
    olds, news = (a.reshape(num_nodes, num_devices // num_nodes, -1) for a in (old, new))
    kept = []
    for of_old, of_new in zip(olds, news, strict=True):
        # stay[i, j]: how many experts of the old device i need not move if it becomes the new device j
        held = [(devices[:, :, None] == np.arange(old.max() + 1)).sum(1) for devices in (of_old, of_new)]
        stay = np.array([np.minimum(counts, held[1]).sum(1) for counts in held[0]])
        for device, experts in enumerate(of_old):
            best = int(np.argmax(stay[device]))
            stay[:, best] = -1
            kept.append(_in_order(experts, of_new[best]))
    return np.concatenate(kept)


def _in_order(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The experts `new` of one device, each in a place where it lies already, if there is one."""
    left, out = list(new), np.full(len(old), -1)
    for place, expert in enumerate(old):
        if expert in left:
            left.remove(expert)
            out[place] = expert
    out[out < 0] = left
    return out


def places_of(placement: Int[np.ndarray, "L P"], num_experts: int, most: int
              ) -> tuple[Int[np.ndarray, "L E R"], Int[np.ndarray, "L E"]]:  # fmt: skip
    """(the places of each expert, how many they are); what is past the count repeats the first place.

    most: R, at least as many as any expert has.
    """
    num_layers = len(placement)
    places = np.zeros((num_layers, num_experts, most), np.int32)
    counts = np.zeros((num_layers, num_experts), np.int32)
    for layer, experts in enumerate(placement):
        for place, expert in enumerate(experts):
            if counts[layer, expert] == 0:
                places[layer, expert] = place
            places[layer, expert, counts[layer, expert]] = place
            counts[layer, expert] += 1
    return places, counts


def device_loads(load: Float[np.ndarray, "L E"], placement: Int[np.ndarray, "L P"], num_devices: int
                 ) -> Float[np.ndarray, "L devices"]:  # fmt: skip
    """What each device has to do, if an expert's replicas share its load evenly."""
    found = []
    for of_expert, experts in zip(load, placement, strict=True):
        share = of_expert / np.maximum(np.bincount(experts, minlength=len(of_expert)), 1)
        found.append(share[experts].reshape(num_devices, -1).sum(1))
    return np.array(found)


def balancedness(load: Float[np.ndarray, "L E"], placement: Int[np.ndarray, "L P"], num_devices: int
                 ) -> Float[np.ndarray, " L"]:  # fmt: skip
    """Mean over greatest load of the devices, for each layer: 1 is even, 1/n is all on one. Without load 1."""
    loads = device_loads(load, placement, num_devices)
    greatest = loads.max(1)
    return np.where(greatest > 0, loads.mean(1) / np.maximum(greatest, 1e-9), 1.0)
