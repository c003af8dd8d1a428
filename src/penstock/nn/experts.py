"""The layers of a mixture of experts: the router, the matrices of the experts, and the sum of their results.

Over several ranks each has some rows of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.nn.base import Tensor, nn, torch
from penstock.nn.linear import Linear
from penstock.nn.weight import MatrixLayer, WeightPart
from penstock.ops.call import ops

__all__ = ["ExpertLinear", "Router", "Routing", "combine", "route", "sigmoid_gate"]


@dataclass(frozen=True)
class Routing:
    """The rule by which a token chooses experts: the attributes of op ``route``."""

    k: int
    score: str = "softmax"
    renormalise: bool = False
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_rule: str = "max"


class Router(Linear):
    """The linear that scores the experts.  It computes in float32 under every scheme."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [T, experts] of x [T, hidden]."""
        y: Tensor = ops.linear(x, self.kernel_weight(), self.bias, out_features=self.rows, scheme="f32")
        return y


def route(logits: Tensor, rule: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights [T, k] and the ids [T, k] of the experts that ``rule`` chooses by logits [T, experts].

    ``bias`` [experts] is added to the scores only to choose experts.
    """
    weights, ids = ops.route(
        logits,
        bias,
        k=rule.k,
        score=rule.score,
        renormalise=rule.renormalise,
        factor=rule.factor,
        groups=rule.groups,
        kept_groups=rule.kept_groups,
        group_rule=rule.group_rule,
    )
    return weights, ids


def sigmoid_gate(x: Tensor, logits: Tensor) -> Tensor:
    """Return x [T, dim] times the sigmoid of logits [T, 1]."""
    weights, _ = route(logits, Routing(1, "sigmoid"))
    return combine(x.view(-1, 1, x.shape[1]), weights)


def combine(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of x [T, k, dim] weighted with weights [T, k], slot after slot: [T, dim]."""
    y: Tensor = ops.combine(x, weights)
    return y


class ExpertLinear(MatrixLayer):
    """One linear for each expert: their rows lie one expert after another in ``weight`` [experts * out, in].

    A checkpoint has one tensor for each expert; its name has the expert's number before the layer's own name.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(num_experts * out_features, in_features)
        self.num_experts, self.out_features = num_experts, out_features
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return [T, k, out] for ids [T, k]; x is [T, in] or, with a row for each slot, [T, k, in]."""
        y: Tensor = ops.expert_linear(
            x,
            self.kernel_weight(),
            ids,
            self.bias,
            num_experts=self.num_experts,
            out_features=self.out_features,
            scheme=self.scheme,
        )
        return y

    def weight_parts(self, path: str) -> tuple[WeightPart, ...]:
        """Return one part for each expert: "mlp.experts.up_proj" has "mlp.experts.0.up_proj.weight" and so on."""
        parent, _, name = path.rpartition(".")
        rows = self.out_features
        return tuple(WeightPart(f"{parent}.{e}.{name}.weight", e * rows, rows) for e in range(self.num_experts))

    def extra_repr(self) -> str:
        """Return shape and scheme, for ``print``."""
        return f"num_experts={self.num_experts}, {super().extra_repr()}, bias={self.bias is not None}"
