"""Replace every `torch.nn.MultiheadAttention` of a model by ours, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.checks import check_flag, check_kind
from headwise.core.place import Place
from headwise.core.problem import describe
from headwise.nn.call import Call, check_sequence
from headwise.nn.layer_options import Separate, Widths
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.torch_masks import read_torch_masks


def swap_attention(model: nn.Module) -> nn.Module:
    """Replace every nn.MultiheadAttention of the model by ours, in place, and return the model.

    Weights are copied, calls stay the same (`TorchCall` takes their arguments and masks), and
    adapters and hooks on the projections start to work. Create the optimiser afterwards.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerEncoderLayer(64, 8, batch_first=True).eval()
    >>> x = torch.randn(2, 5, 64)
    >>> before = model(x)
    >>> torch.allclose(hw.nn.swap_attention(model)(x), before, atol=1e-6)
    True
    >>> type(hw.nn.restore_attention(model).self_attn).__name__
    'MultiheadAttention'
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not hasattr(module, "nested_before"):
            # Its fast path would pass nested tensors, which only PyTorch's own layers take.
            module.__dict__["nested_before"] = module.use_nested_tensor
            module.use_nested_tensor = False
    return _replaced(model, nn.MultiheadAttention, TorchCall.of)


def restore_attention(model: nn.Module) -> nn.Module:
    """Undo `swap_attention`: nn.MultiheadAttention with the weights as they are now, in place."""
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and hasattr(module, "nested_before"):
            module.use_nested_tensor = module.__dict__.pop("nested_before")
    return _replaced(model, TorchCall, TorchCall.back)


class TorchCall(nn.Module):
    """Our attention with nn.MultiheadAttention's interface: its arguments, masks and results."""

    # PyTorch's encoder layers read these; without a packed bias they don't take their fast path.
    in_proj_bias: None = None
    in_proj_weight: None = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: MultiHeadAttention, batch_first: bool) -> None:
        super().__init__()
        check_kind("attention", attention, MultiHeadAttention, "hw.nn.MultiHeadAttention(64, 8)")
        check_flag("batch_first", batch_first)
        self.attention, self.batch_first = attention, batch_first
        self.embed_dim, self.num_heads = attention.d_model, attention.heads

    @classmethod
    def of(cls, theirs: nn.MultiheadAttention, name: str = "") -> TorchCall:
        """Our attention with the weights, dropout, mode, dtype and device of PyTorch's."""
        if theirs.bias_k is not None or theirs.add_zero_attn:
            option = "add_zero_attn" if theirs.bias_k is None else "add_bias_kv"
            raise ValueError(
                f"{name or 'this attention'} uses {option}, which headwise does not support"
            )
        weight = theirs.out_proj.weight
        with torch.device("meta"):
            ours = MultiHeadAttention(
                theirs.embed_dim,
                theirs.num_heads,
                context_dim=(theirs.kdim, theirs.vdim),
                bias=theirs.in_proj_bias is not None,
                dropout=theirs.dropout,
            )
        ours = ours.to(weight.dtype).to_empty(device=weight.device)
        ours.load_state_dict(theirs.state_dict())
        ours.requires_grad_(weight.requires_grad)
        return cls(ours, theirs.batch_first).train(theirs.training)

    def back(self, name: str = "") -> nn.MultiheadAttention:
        """PyTorch's attention with our weights; ValueError if it could not compute the same."""
        ours = self.attention
        plain = MultiHeadAttention(ours.d_model, ours.heads, context_dim=ours.widths.context)
        extra = set(dict(ours.named_modules())) - set(dict(plain.named_modules()))
        wanted = Widths.of(ours.d_model, ours.heads, context_dim=ours.widths.context)
        if extra or ours.widths != wanted or not isinstance(ours.projections, Separate):
            raise ValueError(
                f"{name or 'this attention'} was changed to something that nn.MultiheadAttention "
                "can't compute"
            )
        weight, (keys, values) = ours.out.weight, ours.widths.context
        theirs = nn.MultiheadAttention(
            ours.d_model,
            ours.heads,
            dropout=ours.dropout,
            bias=ours.out.bias is not None,
            kdim=keys,
            vdim=values,
            batch_first=self.batch_first,
            device=weight.device,
            dtype=weight.dtype,
        )
        theirs.load_state_dict(_packed(ours, theirs.in_proj_weight is not None))
        theirs.requires_grad_(weight.requires_grad)
        return theirs.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward of nn.MultiheadAttention; in its boolean masks True means hidden."""
        for name, given in (("query", query), ("key", key), ("value", value)):
            check_sequence(name, given)
        check_flag("need_weights", need_weights)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, but attn_mask is None")
        same = key is query and value is query
        batch_second = query.ndim == 3 and not self.batch_first
        if batch_second:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        _check_masks(query, key, attn_mask, key_padding_mask, self.num_heads)
        mask, bias = read_torch_masks(
            attn_mask,
            key_padding_mask,
            self.num_heads,
            is_causal=is_causal,
            need_weights=need_weights,
            same_sequence=same,
        )
        context, values = None if same else key, None if value is key else value
        out = self.attention(query, context, values=values, mask=mask, bias=bias)
        weights = None
        if need_weights:
            weights = _weights(self.attention.prepare(query, context, mask=mask, bias=bias))
            weights = weights.mean(-3) if average_attn_weights else weights
        return out.transpose(0, 1) if batch_second else out, weights


def _check_masks(
    query: Tensor, key: Tensor, attn_mask: object, key_padding_mask: object, heads: int
) -> None:
    """Raise ValueError unless the masks fit query (B, N, D) and key (B, M, D), or without B."""
    batch, queries, keys = query.shape[:-2], query.shape[-2], key.shape[-2]
    every = torch.Size((*(b * heads for b in batch or (1,)), queries, keys))
    for name, given, shapes in (
        ("attn_mask", attn_mask, (torch.Size((queries, keys)), every)),
        ("key_padding_mask", key_padding_mask, (torch.Size((*batch, keys)),)),
    ):
        if given is None or (
            isinstance(given, Tensor)
            and given.shape in shapes
            and (given.dtype == torch.bool or given.is_floating_point())
        ):
            continue
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(
            f"{name} must be a tensor {wanted} of booleans or floats, not {describe(given)}"
        )


def _weights(call: Call) -> Tensor:
    """The weights (..., H, N, M) before dropout, whole and with gradients, like PyTorch's."""
    s = call.q @ call.k.mT * call.q.shape[-1] ** -0.5
    seen = torch.ones_like(s, dtype=torch.bool)
    if isinstance(call.bias, Tensor):
        s, seen = s + call.bias, seen & (call.bias != -torch.inf)
    if call.mask is not None:
        batch, offset = s.shape[0] if s.ndim == 4 else 1, s.shape[-1] - s.shape[-2]
        heads, queries, keys = s.shape[-3:]
        place = Place(batch, heads, queries, keys, offset=offset, device=s.device)
        dense = call.mask.to_dense(place)
        seen = seen & (dense if s.ndim == 4 else dense[0])
    p: Tensor = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1) * seen
    return p


def _replaced(model: nn.Module, kind: type[nn.Module], make: Callable[..., nn.Module]) -> nn.Module:
    """Replace each module of a kind; one that is used in two places stays one."""
    made: dict[int, nn.Module] = {}
    places = [
        (parent, f"{path}.{name}" if path else name, name, child)
        for path, parent in model.named_modules()
        for name, child in parent._modules.items()  # named_children() omits a second place
        if isinstance(child, kind)
    ]
    for parent, path, name, child in places:
        if id(child) not in made:
            made[id(child)] = make(child, path)
        setattr(parent, name, made[id(child)])
    return make(model) if isinstance(model, kind) else model


def _packed(ours: MultiHeadAttention, together: bool) -> dict[str, Tensor]:
    """Our weights under nn.MultiheadAttention's names."""
    state = ours.state_dict()
    packed = {key.replace("out.", "out_proj."): x for key, x in state.items() if key[:4] == "out."}
    made = ("query", "key", "value")
    if together:
        packed["in_proj_weight"] = torch.cat([state[f"{name}.weight"] for name in made])
    else:
        packed |= {f"{name[0]}_proj_weight": state[f"{name}.weight"] for name in made}
    if "query.bias" in state:
        packed["in_proj_bias"] = torch.cat([state[f"{name}.bias"] for name in made])
    return packed
