from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from serving.expert_metrics import expert_metrics
from serving.request import ExpertStats


def rendered(stats: ExpertStats) -> list[str]:
    class One(Collector):
        def collect(self):
            return expert_metrics(stats, ("engine",), ("0",))

    registry = CollectorRegistry()
    registry.register(One())
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_every_layer_and_every_expert():
    stats = ExpertStats(layers=[1, 2], balancedness=[0.5, 1.0], tokens=[[3, 4], [5, 6]], layers_moved=7)
    assert rendered(stats) == [
        'pageloom:expert_balancedness{engine="0",layer="1"} 0.5',
        'pageloom:expert_balancedness{engine="0",layer="2"} 1.0',
        'pageloom:expert_layers_moved_total{engine="0"} 7.0',
        'pageloom:expert_tokens_total{engine="0",expert="0",layer="1"} 3.0',
        'pageloom:expert_tokens_total{engine="0",expert="1",layer="1"} 4.0',
        'pageloom:expert_tokens_total{engine="0",expert="0",layer="2"} 5.0',
        'pageloom:expert_tokens_total{engine="0",expert="1",layer="2"} 6.0',
    ]


def test_many_experts_have_no_series_of_their_own():
    lines = rendered(ExpertStats(layers=[0], balancedness=[0.25], tokens=[]))
    assert lines == ['pageloom:expert_balancedness{engine="0",layer="0"} 0.25',
                     'pageloom:expert_layers_moved_total{engine="0"} 0.0']
