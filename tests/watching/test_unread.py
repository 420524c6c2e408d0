"""A watch is complete, or says what it leaves out; and it never ends what it watches."""

import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching import open_run

B, H, N, D = 2, 4, 6, 8
watching: Any = sys.modules["headwise.watching.training_steps"]


class Softmax(nn.Module):
    """Somebody's own softmax, in a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Product(nn.Module):
    """The product with the values, in a module of its own."""

    def forward(self, p: Tensor, v: Tensor) -> Tensor:
        return p @ v


class Written(nn.Module):
    """Attention written out, by any way from logits and values to an output."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way, self.num_heads = way, H
        self.qkv, self.softmax, self.product = nn.Linear(H * D, 3 * H * D), Softmax(), Product()

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        later = torch.ones(N, N, dtype=torch.bool).triu(1)
        return (q @ k.mT / D**0.5).masked_fill(later, -1e30), v

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, *self.logits(x))


class Pair(nn.Module):
    """One layer that headwise reads in any case, beside its own engine, and another."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.known, self.other = hw.nn.MultiHeadAttention(H * D, H, engine="sdpa"), other

    def forward(self, x: Tensor) -> Any:
        return self.known(x), self.other(x)


def exponentials(_: Written, s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def one_by_one(_: Written, s: Tensor, v: Tensor) -> Tensor:
    """torch.mm, which takes one head of one sequence."""
    p = s[0, 0].softmax(-1)
    return torch.mm(p, v[0, 0])


def added(_: Written, s: Tensor, v: Tensor) -> Tensor:
    p, v = s.softmax(-1).flatten(0, 1), v.flatten(0, 1)
    return torch.baddbmm(torch.ones(B * H, N, D), p, v, beta=0.5, alpha=2.0)


def grouped(_: Written, s: Tensor, v: Tensor) -> Tensor:
    """Two heads for each head of keys and values, on an axis of their own."""
    p = s.unflatten(1, (2, 2)).softmax(-1)
    return torch.einsum("bkgqs,bksd->bkgqd", p, v[:, ::2])


def in_parts(_: Written, s: Tensor, v: Tensor) -> Tensor:
    p = s.softmax(-1)
    return p[..., :2] @ v[..., :2, :] + p.narrow(-1, 2, N - 2) @ v[..., 2:, :]


WAYS: dict[str, Callable[[Written, Tensor, Tensor], Tensor]] = {
    "softmax in a module": lambda m, s, v: m.softmax(s) @ v,
    "product in a module": lambda m, s, v: m.product(s.softmax(-1), v),
    "both in modules": lambda m, s, v: m.product(m.softmax(s), v),
    "bmm": lambda _, s, v: torch.bmm(s.softmax(-1).flatten(0, 1), v.flatten(0, 1)),
    "baddbmm": added,
    "mm": one_by_one,
    "transposed product": lambda _, s, v: v.mT @ s.softmax(-1).mT,
    "times and sum": lambda _, s, v: (s.softmax(-1)[..., None] * v[:, :, None]).sum(-2),
    "unsqueezed": lambda _, s, v: (v[:, :, None] * s.softmax(-1).unsqueeze(-1)).sum(dim=3),
    "keys before queries": lambda _, s, v: s.mT.softmax(-2).mT @ v,
    "keys first, in einsum": lambda _, s, v: torch.einsum("bhkq,bhkd->bqhd", s.mT.softmax(2), v),
    "exponentials over their sum": exponentials,
    "log softmax": lambda _, s, v: s.log_softmax(-1).exp() @ v,
    "times a mask": lambda _, s, v: (torch.ones(N, N) * s.softmax(-1)) @ v,
    "a third axis": lambda _, s, v: s[:, None].softmax(-1) @ v[:, None],
    "grouped heads": grouped,
    "keys in two parts": in_parts,
    "folded heads in two parts": lambda m, s, v: in_parts(m, s.flatten(0, 1), v.flatten(0, 1)),
    "keys in another order": lambda _, s, v: s.softmax(-1).roll(2, -1) @ v.roll(2, -2),
    "padded keys": lambda _, s, v: F.pad(s.softmax(-1), (1, 2)) @ F.pad(v, (0, 0, 1, 2), value=3.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_common_ways_of_writing_attention_out_are_read(way: str) -> None:
    model, x = Pair(Written(WAYS[way])), torch.randn(B, N, H * D)
    before = model(x)
    with hw.watch(model) as seen:
        out = model(x)
    assert all(map(torch.equal, out, before))
    assert seen.unread == []
    assert [layer.name for layer in seen.layers] == ["known", "other"]
    p = model.other.logits(x)[0].softmax(-1)
    p = p[:1, :1] if way == "mm" else p
    torch.testing.assert_close(seen.layers[1].map().to_tensor(), p, rtol=1e-4, atol=1e-6)


OFF = ["softmax in a module", "baddbmm", "transposed product", "grouped heads", "keys in two parts"]
OFF += ["folded heads in two parts"]


@pytest.mark.parametrize("way", OFF)
def test_a_head_is_switched_off_in_every_way(way: str) -> None:
    model, x = Written(WAYS[way]), torch.randn(B, N, H * D)
    with hw.watch(model) as seen:
        whole = model(x)
        seen._recorder.interventions.silenced = {"": 1}
        out = model(x)
    changed = (out != whole).reshape(B, H, -1).any(-1)
    assert changed.tolist() == [[False, True, False, False]] * B


UNREADABLE: dict[str, Callable[[Written, Tensor, Tensor], Tensor]] = {
    "windows": lambda _, s, v: F.pad(s.softmax(-1), (0, 2))[..., 1:-1] @ v,
    "never multiplied": lambda _, s, v: s.softmax(-1),
    "changed weights": lambda _, s, v: (2 * s.softmax(-1)) @ v,
    "mixed heads": lambda m, s, v: (s.softmax(-1).mT @ m.qkv.weight[:N, :N]).mT @ v,
    "read by its memory": lambda _, s, v: (p := s.softmax(-1)).as_strided(p.shape, p.stride()) @ v,
    "as many windows as heads": lambda _, s, v: alike(s, 1).softmax(-1) @ alike(v, 1),
    "weights used twice": lambda _, s, v: alike(s.softmax(-1), 0) @ alike(v, 0),
    "changed parts": lambda _, s, v: (2 * s.softmax(-1).flip(-1)) @ v.flip(-2),
}


def alike(x: Tensor, axis: int) -> Tensor:
    """A new axis of as many entries as there are heads."""
    return x.unsqueeze(axis).repeat_interleave(H, axis)


@pytest.mark.parametrize("way", UNREADABLE)
def test_what_is_not_read_is_said(way: str, tmp_path: Path) -> None:
    model, x = Pair(Written(UNREADABLE[way])), torch.randn(B, N, H * D)
    if way == "mixed heads":
        model.other.qkv.weight.requires_grad_(False)
    before = model(x)
    watch = hw.watch(model)
    with pytest.warns(UserWarning, match="the attention of 1 module.*other: "), watch as seen:
        out = model(x)
    with watch:
        model(x)  # one warning is enough
    assert all(map(torch.equal, out, before))
    assert seen.unread == ["other"]
    assert [layer.name for layer in seen.layers] == ["known"]
    assert str(seen.heads()).endswith("(could not be read: other)")
    seen.save(tmp_path / "run")
    assert open_run(tmp_path / "run").unread == ["other"]
    with pytest.raises(ValueError, match="other can't be watched"), hw.watch(model, strict=True):
        model(x)


def test_logits_are_not_held_longer_than_needed() -> None:
    model, x = Pair(Written(WAYS["bmm"])), torch.randn(B, N, H * D)
    with hw.watch(model, maps=False) as seen:
        held = model(x)  # autograd keeps the weights
        (undo,) = [x for x in seen._undo if getattr(x, "__name__", "") == "leave_all"]
        assert not undo.__self__.running.written_out.waiting
    assert held[1].requires_grad


def test_a_model_of_which_nothing_is_read_is_an_error_with_the_reason() -> None:
    model, said = (
        Written(UNREADABLE["windows"]),
        "no attention could be read in this Written; the mo",
    )

    def watched() -> None:
        with hw.watch(model, effects=True) as seen:
            model(torch.randn(B, N, H * D))
            with pytest.raises(ValueError, match=said):
                seen.edges()

    with pytest.warns(UserWarning, match="the attention of 1 module"):  # noqa: SIM117
        with pytest.raises(ValueError, match=said):
            watched()


def test_softmaxes_that_are_no_attention_are_not_reported() -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pixels = x.unflatten(-1, (H, D)).transpose(1, 2).softmax(1)  # a segmentation
            return x.softmax(-1) + pixels.sum() + (x @ x.mT).softmax(-1)[:, :, :1].sum() * 0

    class Gates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            experts = torch.stack([x, 2 * x, 3 * x], 2)  # (B, N, 3, D)
            p = x[..., :3].softmax(-1)
            gated = (p[..., None] * experts).sum(2) + torch.einsum("bne,bned->bnd", p, experts)
            pooled = (x[..., :1].softmax(1) * x).sum(1)
            heads = x.unflatten(-1, (H, D)).transpose(1, 2)
            alone = (heads[..., :1].softmax(-1) * heads).sum(-1)  # over one key
            return gated + pooled[:, None] + alone.sum()

    model = Pair(nn.Sequential(nn.Softmax(-1), Gates()))
    with hw.watch(model) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.unread == []
    routed = Pair(Classes())
    with pytest.warns(UserWarning, match="other: no values were found"), hw.watch(routed) as seen:
        routed(torch.randn(B, N, H * D))  # (B, N, N), and nothing is made of it
    assert seen.unread == ["other"]


def test_a_module_in_which_nothing_is_heard_is_left_alone_until_the_64th_pass() -> None:
    heard: list[int] = []

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heard.append(torch._C._len_torch_function_stack())  # the watch listens by a mode
            return x + 1

    model, x = Pair(Plain()), torch.randn(1, N, H * D)
    with torch.no_grad(), hw.watch(model, maps=False):
        for _ in range(66):
            model(x)
    assert heard == [1, 1, *[0] * 62, 1, 1]


def test_nothing_to_watch_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="there is nothing to watch in this Linear"):
        hw.watch(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="nothing to watch in this Sequential"):
        hw.watch(nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU()))


@pytest.mark.parametrize("way", ["bmm", "transposed product", "exponentials over their sum"])
def test_maps_of_written_attention_are_saved_and_kept(way: str, tmp_path: Path) -> None:
    model, x = Written(WAYS[way]), torch.randn(B, N, H * D)
    watch = hw.watch(model)
    with watch, watch.record(tmp_path / "run", keep=[(0, 2)], keep_every=1):
        for _ in range(2):
            model(x)
            watch.step()
    p = model.logits(x)[0].softmax(-1)[:1, 2:3]
    with hw.watch(model) as seen:
        model(x)
    seen.save(tmp_path / "saved", maps=[(0, 2)])
    for folder in ("run", "saved"):
        kept = open_run(tmp_path / folder).map(0, 2)
        torch.testing.assert_close(kept.to_tensor(), p, rtol=1e-4, atol=1e-6)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of order")


class Broken:
    """A rule that fails."""

    name: ClassVar[str] = "broken"
    source = says = "nowhere"
    needs: ClassVar[tuple[str, ...]] = ("entropy",)
    every: ClassVar[int] = 1
    check = staticmethod(broken)


@pytest.mark.parametrize("target", ["recorder", "board", "statistics", "map", "heads", "rule"])
def test_whatever_goes_wrong_a_training_goes_on(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = Pair(Written(WAYS["bmm"])), torch.randn(B, N, H * D)
    alone = [y.detach() for y in model(x)]
    optimiser = torch.optim.SGD(model.parameters(), 0.0)
    if target == "recorder":
        monkeypatch.setattr("headwise.watching.recorder.call_recorder.SeenCall", broken)
    if target == "board":
        monkeypatch.setattr("headwise.watching.recorder.board.reduce_rows", broken)
    if target == "statistics":
        monkeypatch.setattr("headwise.watching.recorder.call_recorder.statistics", broken)
        monkeypatch.setattr("headwise.watching.recorder.call_recorder.observe", broken)
    if target == "map":
        monkeypatch.setattr("headwise.watching.runs.run_writer.write_map", broken)
    watch = hw.watch(model, alarms=[Broken()] if target == "rule" else False)
    if target == "heads":
        monkeypatch.setattr("headwise.watching.training_steps.HeadRows", broken)
    unread = dict.fromkeys(("recorder", "board", "statistics"), "2 modules")
    failing = {**unread, "heads": "ending a step failed"}
    quiet = target not in failing
    writer = watch.record(tmp_path / "run", keep=[(0, 1)], keep_every=1)

    def train() -> None:
        with watch, writer:
            for _ in range(3):
                optimiser.zero_grad()
                first, second = model(x)
                (first.sum() + second.sum()).backward()
                optimiser.step()
                assert torch.equal(first, alone[0])
                assert torch.equal(second, alone[1])

    if quiet:
        train()
    else:
        with pytest.warns(UserWarning, match=failing[target]):
            train()
    assert watch.steps == 3
    said = {"map": "the map of head 1 in layer 0", "rule": "the alarm for broken failed"}
    if quiet:
        assert sum(said[target] in line for line in caplog.messages) == 1
    assert open_run(tmp_path / "run").ended


def trained(watch: hw.Watch, model: nn.Module, steps: int, by_hand: bool) -> None:
    optimiser = torch.optim.Adam(model.parameters())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(1, 5, 16)).sum().backward()
        optimiser.step()
        other.step()
        if by_hand:
            watch.step()


@pytest.mark.parametrize("by_hand", [True, False])
def test_steps_end_with_the_optimiser_or_by_hand_and_never_twice(by_hand: bool) -> None:
    model = hw.nn.MultiHeadAttention(16, 4)
    with hw.watch(model, every=2) as seen:
        trained(seen, model, 6, by_hand)
    assert seen.steps == 6
    assert [entry.step for entry in seen.series] == [0, 2, 4]


def test_a_series_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "IN_MEMORY", 3)
    model = hw.nn.MultiHeadAttention(16, 4)
    with hw.watch(model) as seen:
        trained(seen, model, 5, by_hand=False)
    assert [entry.step for entry in seen.series] == [2, 3, 4]
    assert seen.steps == 5


def stand_in() -> types.ModuleType:
    """A package with the functions of flash_attn, computed by PyTorch."""
    made = types.ModuleType("flash_attn")

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        q, k, v = (x.detach().numpy() for x in (q, k, v))  # as a kernel, unseen by PyTorch
        out = reference(*map(torch.from_numpy, (q, k, v)), softmax_scale, causal, window_size)
        return out

    def flash_attn_qkvpacked_func(qkv: Tensor, *given: Any, **options: Any) -> Tensor:
        return flash_attn_func(*qkv.unbind(2), *given, **options)

    def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *given: Any, **options: Any) -> Tensor:
        return flash_attn_func(q, *kv.unbind(2), *given, **options)

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *given: Any, **_: Any) -> Tensor:
        ends = given[0].tolist()
        parts = [slice(a, b) for a, b in pairwise(ends)]
        made = [reference(q[None, x], k[None, x], v[None, x], None, True, (-1, -1)) for x in parts]
        return torch.cat(made, 1)[0]

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **_: Any) -> Tensor:
        return flash_attn_func(q, k_cache, v_cache, causal=True)

    for function in list(locals().values()):
        if callable(function):
            setattr(made, function.__name__, function)
    return made


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int]
) -> Tensor:
    """Attention of (B, N, H, D), aligned at the end, outside of any mode."""
    with torch._C.DisableTorchFunction():
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        j = torch.arange(k.shape[2])
        seen = (j <= i) if causal else torch.ones_like(j <= i)
        seen = seen & (j >= i - window[0]) if window[0] >= 0 else seen
        seen = seen & (j <= i + window[1]) if window[1] >= 0 else seen
        s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        s = (s * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, -torch.inf)
        out = s.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return out.transpose(1, 2)


class Flash(nn.Module):
    """A model that calls flash_attn by itself."""

    def __init__(self, call: Callable[..., Tensor], kv_heads: int = H) -> None:
        super().__init__()
        self.call, self.kv_heads = call, kv_heads

    def heads(self, x: Tensor) -> list[Tensor]:
        q = x.unflatten(-1, (H, D))
        return [q, *(q.roll(n, 1)[:, :, : self.kv_heads] for n in (1, 2))]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(sys.modules["flash_attn"], *self.heads(x))


ENDS = torch.tensor([0, 2, 6])
FLASH: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "func": (lambda f, q, k, v: f.flash_attn_func(q, k, v, causal=True), hw.mask.causal()),
    "window": (
        lambda f, q, k, v: f.flash_attn_func(q, k, v, 0.0, None, True, (2, 0)),
        hw.mask.causal() & hw.mask.window(2),
    ),
    "none behind": (lambda f, *x: f.flash_attn_func(*x, window_size=(-1, 0)), hw.mask.causal()),
    "qkvpacked": (lambda f, *x: f.flash_attn_qkvpacked_func(torch.stack(x, 2)), None),
    "kvpacked": (lambda f, q, *x: f.flash_attn_kvpacked_func(q, torch.stack(x, 2)), None),
    "varlen": (
        lambda f, *x: f.flash_attn_varlen_func(*(y[0] for y in x), ENDS, ENDS, 4, 4, causal=True),
        hw.mask.causal() & hw.mask.documents(torch.tensor([[0, 0, 1, 1, 1, 1]])),
    ),
}


@pytest.mark.parametrize("way", FLASH)
def test_flash_attn_is_read_where_it_is_installed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in())
    before = dict(vars(sys.modules["flash_attn"]))
    call, mask = FLASH[way]
    model, x = Flash(call), torch.randn(1, N, H * D)
    alone = model(x)
    with hw.watch(model, strict=True) as seen:
        assert torch.equal(model(x), alone)
    q, k, _ = (y.transpose(1, 2) for y in model.heads(x))
    torch.testing.assert_close(
        seen.map(0, 1).to_tensor(), hw.attention_map(q, k, mask=mask).to_tensor()[:, 1:2]
    )
    assert dict(vars(sys.modules["flash_attn"])) == before


def test_flash_attn_with_a_cache_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in())
    model = Flash(lambda f, *x: f.flash_attn_with_kvcache(*x))
    refused = pytest.raises(ValueError, match="flash_attn_with_kvcache: it is not known where")
    with refused, hw.watch(model, strict=True):
        model(torch.randn(1, N, H * D))
