"""Mixture of experts, token by token in float64 numpy: what `app.ops.experts` and `app.models.moe` must equal."""

import numpy as np


def silu(x):
    return x / (1.0 + np.exp(-x))


def expert_mlp(x_ND, experts_NK, weights_NK, gate_EDF, up_EDF, down_EFD):
    """Sum over a token's experts of weight * down(silu(gate x) * up x); an expert number of E or more is none."""
    out_ND = np.zeros(x_ND.shape, np.float64)
    for n, x_D in enumerate(np.asarray(x_ND, np.float64)):
        for e, weight in zip(experts_NK[n], weights_NK[n], strict=True):
            if e < len(gate_EDF):
                hidden_F = silu(x_D @ np.asarray(gate_EDF[e], np.float64)) * (x_D @ np.asarray(up_EDF[e], np.float64))
                out_ND[n] += float(weight) * (hidden_F @ np.asarray(down_EFD[e], np.float64))
    return out_ND


def balance_loss(logits_LNE, experts_per_token):
    """The published load-balancing loss of one router per layer, pooled over layers and tokens, and its logsumexp^2."""
    L, N, E = logits_LNE.shape
    logits = np.asarray(logits_LNE, np.float64).reshape(-1, E)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1)[:, :experts_per_token]
    share_E = np.bincount(chosen.ravel(), minlength=E) / (L * N)
    return E * float(share_E @ probability.mean(axis=0)), float(np.mean(np.log(np.exp(logits).sum(axis=1)) ** 2))
