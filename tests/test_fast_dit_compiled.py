"""Blocks that torch.compile takes as a whole: the same numbers, one graph for each shape, and nothing done twice."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fast_dit import (
    CPU,
    adapted,
    exact,
    fast,
    inputs_of,
    largest_error,
    noisy,
    plain,
    small,
    step,
    trained,
    vectors_model,
)
from parity import max_abs, rel_rms
from tiny_qwen import make_transformer
from torch.fx import GraphModule

from wangen.runtime.fast import compiled_products, dit_compiled, dit_elementwise, products
from wangen.runtime.fast.attention import Kernel
from wangen.runtime.fast.products import by_onednn
from wangen.runtime.memory.quantize import quantize_blocks
from wangen.runtime.memory.swap import BlockSwap
from wangen.runtime.models import inputs as inputs_module
from wangen.runtime.models import qwen_image_edit
from wangen.runtime.models.compute import Compute

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of its own ways


def is_block(graph: GraphModule) -> bool:
    """Whether a graph is that of a block, and not of a norm alone."""
    parts = (part for part in graph.modules() if isinstance(part, GraphModule))
    return any("softmax" in str(node.target) for part in parts for node in part.graph.nodes)


class Graphs:
    """A backend that runs graphs operation by operation."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.fails = False

    def __call__(self, graph: GraphModule, _: list[Any]) -> Any:
        """What runs a graph."""
        self.num_blocks += is_block(graph)
        if self.fails and is_block(graph):
            raise RuntimeError("out of registers\nand more lines")
        return graph.forward


def forget() -> None:
    """Let nothing be compiled any more."""
    torch._dynamo.reset()
    dit_compiled._compiled.cache_clear()
    dit_elementwise.compiled.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays; the compiler's own trace, which takes long, is not written."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    forget()
    yield
    forget()


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """What the user reads, from a level on; other tests may have left the logger at any."""
    return [record.message for record in caplog.records if record.name == "wangen" and record.levelno >= level]


@pytest.fixture
def graphs(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Torch's compiler without the making of kernels."""
    found = Graphs()
    monkeypatch.setattr(dit_elementwise, "BACKEND", found)
    return found


@pytest.mark.slow
def test_eight_blocks_are_one_graph_and_another_shape_is_another(graphs: Graphs, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "wangen")
    model = adapted(small(8))
    velocity = fast(model, compile=True)
    for num_graphs, inputs in [(1, noisy(1, 1, 8, 8)), (1, noisy(1, 1, 8, 8, rows=9)), (2, noisy(2, 1, 4, 8))]:
        output, gradients = step(model, velocity, inputs)
        wanted_output, wanted = exact(model, inputs)
        assert graphs.num_blocks == num_graphs
        assert max_abs(output, wanted_output) < 1e-5
        _, rounded = step(model, plain(model), inputs)
        assert largest_error(gradients, wanted) < largest_error(rounded, wanted) / 4  # 1/14 to 1/7 on Intel's
    assert said(caplog) == ["--compile: 8 blocks as a whole, one graph for each shape"]


@pytest.mark.slow
def test_before_ampere_no_block_is_compiled_as_a_whole(
    graphs: Graphs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Inductor makes nothing of bfloat16 there, and a whole block has attention of its own."""
    caplog.set_level(logging.INFO, "wangen")
    monkeypatch.setattr("fast_dit.choose_kernel", lambda *_words: Kernel("sdpa", widens=True))
    model, inputs = adapted(small(8)), noisy(1, 1, 8, 8)
    _, gradients = step(model, fast(model, compile=True), inputs)
    assert largest_error(gradients, exact(model, inputs)[1]) < 1e-5
    assert graphs.num_blocks == 0
    (line,) = said(caplog)
    assert "of 8 norms, rotations and gates, since this card computes no bfloat16" in line


@pytest.mark.slow
def test_tokens_with_times_of_their_own_go_through_whole_blocks(graphs: Graphs):
    model, inputs = adapted(vectors_model("dit_ti2v5b")), inputs_of("dit_ti2v5b", batch=2)
    assert inputs.timesteps.ndim == 2
    output, gradients = step(model, fast(model, compile=True, checkpointing="full"), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert graphs.num_blocks == 1
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(gradients, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("second", "num_graphs"), [((1, 8, 4), 1), ((2, 6, 6), 0)])
def test_packed_batches_of_one_size_with_images_go_through_whole_blocks(
    graphs: Graphs, caplog: pytest.LogCaptureFixture, second: tuple[int, ...], num_graphs: int
):
    """Packs of several sizes are almost as many shapes as steps."""
    caplog.set_level(logging.INFO, "wangen")
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    passes = [
        inputs_module.Inputs(noise(batch, 16, *shape), torch.linspace(100, 900, batch),
                             [noise(5 + 4 * number, 4096) for number in range(batch)],
                             noise(batch, 20, *shape), noise(batch, 257, 1280))
        for batch, *shape in [(1, 1, 8, 4), (2, *second)]
    ]  # fmt: skip
    model = adapted(vectors_model("dit_i2v21"))
    results = []
    for velocity in (fast(model, compile=True, split_attention=True), fast(model)):
        for parameter in trained(model).values():
            parameter.grad = None
        outputs = velocity.packed(passes)
        torch.stack([(output - 1).square().mean() for output in outputs]).sum().backward()
        results.append((torch.cat([output.flatten() for output in outputs]).detach(),
                        {name: parameter.grad for name, parameter in trained(model).items()}))  # fmt: skip
    (output, gradients), (wanted_output, wanted) = results
    assert graphs.num_blocks == num_graphs
    assert ("of several sizes" in said(caplog)[0]) is (num_graphs == 0)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(gradients, wanted) < 1e-5


CANNOT = {
    "dora": "no plain low-rank ones",
    "trained": "no plain low-rank ones",
    "int8": "quantised",
    "swapped": "swapped",
    "offload": "host memory",
}


@pytest.mark.slow
@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_be_a_whole_goes_on_by_parts_and_says_so(
    why: str, graphs: Graphs, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "wangen")
    model, inputs = small(2), noisy(1, 1, 4, 4)
    if why == "int8":
        quantize_blocks(model, "int8")
    model = adapted(model, "dora" if why == "dora" else "lora")
    if why == "trained":
        model.blocks.requires_grad_(True)
    swap = BlockSwap(model, 2, CPU) if why == "swapped" else None
    way: Any = {"checkpointing": "full", "offload": why == "offload"}
    found = step(model, fast(model, swap, compile=True, **way), inputs)
    wanted = step(model, fast(model, swap, **way), inputs)
    assert graphs.num_blocks == 0
    assert len(said(caplog)) == 1
    assert CANNOT[why] in said(caplog)[0]
    assert max_abs(found[0], wanted[0]) < 1e-5
    assert largest_error(found[1], wanted[1]) < 3e-5


@pytest.mark.slow
def test_a_compiler_that_fails_is_asked_once(graphs: Graphs, caplog: pytest.LogCaptureFixture):
    graphs.fails = True
    model, inputs = adapted(small(2)), noisy(1, 1, 4, 4)
    velocity = fast(model, compile=True)
    found = [step(model, velocity, inputs) for _ in range(2)]
    assert [message.count("out of registers") for message in said(caplog, logging.WARNING)] == [1]
    assert graphs.num_blocks == 1
    wanted = step(model, fast(model), inputs)
    assert max_abs(found[1][0], wanted[0]) < 1e-5
    assert largest_error(found[1][1], wanted[1]) < 3e-5


@pytest.mark.slow
def test_a_compiler_that_fails_at_the_backward_pass_says_so_before(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from torch._dynamo.backends.common import aot_autograd

    def run(graph: GraphModule, _: Any) -> Any:
        return graph.forward

    def refuse(graph: GraphModule, _: Any) -> Any:
        if "softmax" in graph.code:
            raise RuntimeError("out of registers")
        return graph.forward

    monkeypatch.setattr(dit_elementwise, "BACKEND", aot_autograd(fw_compiler=run, bw_compiler=refuse))
    model, inputs = adapted(small(2)), noisy(1, 1, 4, 4)
    found = step(model, fast(model, compile=True, checkpointing="full"), inputs)
    assert [message.count("out of registers") for message in said(caplog, logging.WARNING)] == [1]
    assert largest_error(found[1], step(model, fast(model), inputs)[1]) < 3e-5


@pytest.mark.slow
def test_no_number_of_shapes_meets_the_limit_of_the_compiler(graphs: Graphs, caplog: pytest.LogCaptureFixture):
    """Of one function it makes 8 variants and no more. Training and validation in turns."""
    model = adapted(small(2))
    velocity = fast(model, compile=True, checkpointing="selective")
    for num_shapes, height in enumerate(range(2, 20, 2), start=1):
        inputs = noisy(1, 1, height, 8)
        with torch.no_grad():
            inputs(velocity)
        step(model, velocity, inputs)
        assert graphs.num_blocks == 2 * num_shapes
    assert not said(caplog, logging.WARNING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "num_products", "num_attentions"), [("none", 0, 0), ("full", 6, 2), ("selective", 6, 1)]
)
def test_a_recomputation_does_only_what_the_backward_pass_needs(
    checkpointing: str, num_products: int, num_attentions: int, fresh: None, monkeypatch: pytest.MonkeyPatch
):
    """Of the seven frozen products of a block (with q, k, v as one) the last is not done again."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backward: list[GraphModule] = []

    def run(graph: GraphModule, _: Any) -> Any:
        return graph.forward

    def note(graph: GraphModule, _: Any) -> Any:
        backward.append(graph)
        return graph.forward

    aot = aot_autograd(fw_compiler=run, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(dit_elementwise, "BACKEND", aot)
    model = adapted(small(2))
    step(model, fast(model, compile=True, checkpointing=checkpointing), noisy(1, 1, 8, 8))
    (graph,) = (graph for graph in backward if "softmax" in graph.code)
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert sum(node.args[0].meta["val"].ndim == 1 for node in products) == num_products
    attention = torch.ops.aten._softmax.default, *dit_compiled.ATTENTION
    assert sum(node.target in attention for node in graph.graph.nodes) == num_attentions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "checkpointing", "num_asked"),
    [("dit_t2v21", 0, "none", 0), ("dit_i2v21", 2, "full", 8 + 7 + 6), ("dit_ti2v5b", 2, "selective", 0)],
)
def test_compiled_blocks_give_exact_gradients(
    name: str, batch: int, checkpointing: str, num_asked: int, fresh: None, monkeypatch: pytest.MonkeyPatch
):
    """Also where oneDNN is asked for frozen products, forward, once more but for the last one, and back."""
    asked: list[Any] = []
    monkeypatch.setattr(dit_compiled, "has_faster_onednn", lambda: num_asked > 0)
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    monkeypatch.setattr(compiled_products, "by_onednn", lambda *given: asked.append(given) or by_onednn(*given))
    model, inputs = adapted(vectors_model(name)), inputs_of(name, batch=batch)
    output, gradients = step(model, fast(model, compile=True, checkpointing=checkpointing), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert max_abs(output, wanted_output) < 1e-5
    assert largest_error(gradients, wanted) < 1e-5
    assert len(asked) == num_asked * len(model.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [True, False])
def test_compiled_blocks_in_bfloat16(is_fast: bool, fresh: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "is_fast_in_bfloat16", lambda: is_fast)
    model, inputs = adapted(vectors_model("dit_i2v21", torch.bfloat16)), inputs_of("dit_i2v21")
    output, gradients = step(model, fast(model, compile=True, checkpointing="full"), inputs)
    wanted_output, wanted = exact(model, inputs)
    assert rel_rms(output, wanted_output) < 0.02
    assert largest_error(gradients, wanted) < 0.05


@pytest.mark.slow
def test_training_and_passes_without_gradients_are_told_apart(graphs: Graphs, caplog: pytest.LogCaptureFixture):
    """A validation at the first step, without the adapter, has blocks as a whole where the training has none."""
    caplog.set_level(logging.INFO, "wangen")
    model, inputs = adapted(small(2), "dora"), noisy(1, 1, 4, 4)
    velocity = fast(model, compile=True)
    for _ in range(2):
        model.disable_adapters()
        with torch.no_grad():
            inputs(velocity)
        model.enable_adapters()
        step(model, velocity, inputs)
    first, second = said(caplog)
    assert first == "--compile, without gradients: 2 blocks as a whole, one graph for each shape"
    assert second.startswith("--compile: 0 blocks as a whole")
    assert "of 2 norms, rotations and gates, since their adapters are no plain low-rank ones" in second


def test_of_qwen_image_it_is_said_what_is_compiled(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "wangen")
    model = make_transformer()
    for compiles in (False, True):
        qwen_image_edit.velocity_model(model, Compute(compile=compiles), device=CPU, dtype=torch.float32)
    told = [line for line in said(caplog) if "Qwen-Image" in line]  # where nothing is compiled that is said as well
    assert told == ["--compile: of Qwen-Image's blocks norms, rotations and gates, none as a whole"]
