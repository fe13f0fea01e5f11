"""Which experts each token goes to, and with what weights (`RoutingSpec`): the definition that other backends follow.

Called by `ReferenceOps.moe`. Every sum has one order that depends on the spec alone, and exp sees one token's row at a
time, so that the choice never depends on the batch. A score that is NaN counts as the least.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.ops import RoutingSpec
from headrace.kernels.reference.arithmetic import Arithmetic, Floats
from headrace.kernels.reference.functions import sigmoid
from headrace.kernels.reference.ordered import tree_sum


def choose_experts(
    arithmetic: Arithmetic, scores_TE: Floats, bias_E: Floats | None, spec: RoutingSpec
) -> tuple[np.ndarray, Floats]:
    """Expert numbers int64 [T, C] in the order of choice, the best first, and the weight of each [T, C]."""
    chances_TE = _probabilities(arithmetic, scores_TE, spec)
    worth_TE = chances_TE if bias_E is None else chances_TE + bias_E
    if spec.num_groups > 1:
        worth_TE = _only_best_groups(worth_TE, spec)
    chosen_TC = _best(worth_TE, spec.num_per_token)
    weights_TC: Floats = np.take_along_axis(chances_TE, chosen_TC, axis=1)
    if spec.is_normalised:
        weights_TC /= np.maximum(_sum_columns(weights_TC), np.float32(spec.norm_floor))[:, None]
    if spec.scale != 1.0:
        weights_TC *= np.float32(spec.scale)
    return chosen_TC, weights_TC


def _probabilities(arithmetic: Arithmetic, scores_TE: Floats, spec: RoutingSpec) -> Floats:
    if spec.scoring == "sigmoid":
        return arithmetic.apply(sigmoid, scores_TE)
    powers_TE = arithmetic.apply(np.exp, scores_TE - scores_TE.max(axis=1, keepdims=True))
    return powers_TE / tree_sum(np.array(powers_TE.T, order="C"))[:, None]


def _best(worth: Floats, count: int) -> np.ndarray:
    """Indices of the `count` largest along the last axis, the largest first, of equal ones the lowest index first."""
    return np.argsort(-worth, axis=-1, kind="stable")[..., :count]


def _only_best_groups(worth_TE: Floats, spec: RoutingSpec) -> Floats:
    """The worth of experts outside the best groups becomes minus infinity."""
    num_tokens = worth_TE.shape[0]
    worth_TGM = worth_TE.reshape(num_tokens, spec.num_groups, -1)  # M members of each of G groups
    best_TGM = np.take_along_axis(worth_TGM, _best(worth_TGM, spec.num_per_group_score), axis=-1)
    group_worth_TG = _sum_columns(best_TGM.reshape(-1, spec.num_per_group_score)).reshape(num_tokens, -1)
    is_used_TG = np.zeros((num_tokens, spec.num_groups), np.bool_)
    np.put_along_axis(is_used_TG, _best(group_worth_TG, spec.num_groups_used), True, axis=1)
    return np.where(is_used_TG[:, :, None], worth_TGM, np.float32(-np.inf)).reshape(worth_TE.shape)


def _sum_columns(x_TC: Floats) -> Floats:
    """One column after the other."""
    total: Floats = x_TC[:, 0].copy()
    for column in range(1, x_TC.shape[1]):
        total += x_TC[:, column]
    return total
