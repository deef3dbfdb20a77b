"""The optimizer of the matrices."""

import torch


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for the matrices (Newton-Schulz, all layers at once)."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape[1:], []).append(p)
            for (rows, cols), params in by_shape.items():
                update = []
                for p in params:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    update.append(p.grad.lerp(m, group["momentum"]))
                x = torch.cat(update)
                x = x.mT if rows > cols else x
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(5):
                    y = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
                x = (x.mT if rows > cols else x) * max(1, rows / cols) ** 0.5
                for p, u in zip(params, x.split([len(p) for p in params])):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(u, alpha=group["lr"])
