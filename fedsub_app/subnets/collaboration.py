"""FedPAC's combination of classifiers: a quadratic program weights the heads that help a client.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023,
https://arxiv.org/abs/2306.11867 (Eq. 11).
"""

import numpy as np
import torch
from torch import Tensor

SMALLEST_EIGENVALUE, SMALLEST_WEIGHT = 0.01, 1e-3  # both as published


def feature_statistics(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return FedPAC's statistics of a client's features, float [n, d], with labels, int64 [n].

    They are the class means [classes, d] (0 where there is no sample); the class counts, float [classes]; ``h``, the
    means times the classes' frequencies; ``V``, the variance term, a number >= 0.
    """
    classes = torch.arange(num_classes, device=labels.device)
    members = (labels == classes[:, None]).to(features.dtype)  # [classes, n]: index_add has no fixed order on a GPU
    counts = members.sum(1)
    means = members @ features / counts.clamp(min=1)[:, None]
    share = counts / len(labels)
    squares = members @ features.square().sum(1) / counts.clamp(min=1)
    variance = float((share * squares - share.square() * means.square().sum(1)).sum()) / len(labels)
    return means, counts, share[:, None] * means, max(variance, 0.0)


def combination(h: Tensor, variances: Tensor, client: int) -> Tensor:
    """Return the weights with which the clients' heads are combined for ``client``: >= 0, adding up to 1.

    Minimises ``a^T (diag(V) + D) a`` with ``D_jk = sum_c <h_i(c) - h_j(c), h_i(c) - h_k(c)>`` (i: the client) for h,
    float [clients, classes, d], and V >= 0, float [clients]. Where the solver fails, the client's own head stays.
    """
    from scipy.optimize import minimize  # 0.3 s, a tenth of the start of every other method's run

    differences = (h[client].double() - h.double()).flatten(1)
    matrix = (torch.diag(variances.double()) + differences @ differences.T).numpy()
    values, vectors = np.linalg.eigh(matrix)
    if values.min() < 0:  # rounding only: the sum of two such matrices has none
        matrix = (vectors * np.where(values >= SMALLEST_EIGENVALUE, values, 0.0)) @ vectors.T
    scale = max(float(np.abs(matrix).max()), 1e-30)
    count = len(h)
    result = minimize(
        lambda a: a @ matrix @ a / scale,
        np.full(count, 1 / count),
        jac=lambda a: 2 * matrix @ a / scale,
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(count)},
        method="SLSQP",
        options={"ftol": 1e-10, "maxiter": 300},
    )
    weights = torch.zeros(count, dtype=torch.float64)
    if result.success:
        weights = torch.from_numpy(np.where(result.x < SMALLEST_WEIGHT, 0.0, result.x))
    if float(weights.sum()) <= 0:
        weights[client] = 1.0
    return (weights / weights.sum()).float()
