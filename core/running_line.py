"""RunningLine: y ≈ intercept + slope · x, learned from measurements that come one by one and grow old.

Owns the arithmetic of one such line. Knows no units and no clock: an observation ages by those that follow
it. Used by whoever measures (a worker's step thread, the router's event loop), one thread each.
"""

from __future__ import annotations

_MIN_SPREAD = 0.1  # of the mean of x: below it, measurements say little about the slope


class RunningLine:
    """Least squares with exponential forgetting; neither coefficient is ever below 0.

    `typical_x`: where the slope part is thought to be as large as the intercept. It decides as long as all
    measurements lie at one x, which fixes only the sum of the two. `seed`: an observation (x, y) to begin
    with, which ages like any other.
    """

    def __init__(
        self, typical_x: float, decay: float = 0.97, seed: tuple[float, float] | None = None
    ) -> None:
        self.num_observed = 0
        self._typical_x = typical_x
        self._decay = decay
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        if seed is not None:
            self._add(*seed)

    def observe(self, x: float, y: float) -> None:
        """One measurement; both are at least 0."""
        self.num_observed += 1
        self._add(x, y)

    @property
    def coefficients(self) -> tuple[float, float]:
        """(intercept, slope); (0, 0) before the first observation."""
        if self._weight == 0.0:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        guess = mean_y / (mean_x + self._typical_x)
        spread = (_MIN_SPREAD * (mean_x + _MIN_SPREAD * self._typical_x)) ** 2 / self._weight
        variance = max(0.0, self._xx / self._weight - mean_x * mean_x)
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = max(0.0, (covariance + spread * guess) / (variance + spread))
        intercept = mean_y - slope * mean_x
        if intercept < 0.0:
            return 0.0, self._xy / self._xx
        return intercept, slope

    def at(self, x: float) -> float:
        """The line's y."""
        intercept, slope = self.coefficients
        return intercept + slope * x

    def _add(self, x: float, y: float) -> None:
        self._weight = self._weight * self._decay + 1.0
        self._x = self._x * self._decay + x
        self._y = self._y * self._decay + y
        self._xx = self._xx * self._decay + x * x
        self._xy = self._xy * self._decay + x * y
