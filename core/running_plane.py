"""RunningPlane: y ≈ intercept + x_slope · x + z_slope · z, learned from measurements that come one by one.

Owns the arithmetic, as `running_line` does for one variable. Knows no units and no clock: an observation ages
by those that follow it. Used by whoever measures, one thread each.
"""

from __future__ import annotations

_MIN_SPREAD = 0.1  # of the mean: below it, measurements say little about a slope


class RunningPlane:
    """Least squares with exponential forgetting; no coefficient is ever below 0.

    `typical_x`, `typical_z`: where each slope's part is thought to be as large as the intercept. They decide
    as long as measurements do not tell the parts apart.
    """

    def __init__(self, typical_x: float, typical_z: float, decay: float = 0.99) -> None:
        self._typical_x = typical_x
        self._typical_z = typical_z
        self._decay = decay
        self._weight = self._x = self._z = self._y = 0.0
        self._xx = self._zz = self._xz = self._xy = self._zy = 0.0
        self._known: tuple[float, float, float] | None = None

    def observe(self, x: float, z: float, y: float) -> None:
        """One measurement; all three are at least 0."""
        decay = self._decay
        self._weight = self._weight * decay + 1.0
        self._x = self._x * decay + x
        self._z = self._z * decay + z
        self._y = self._y * decay + y
        self._xx = self._xx * decay + x * x
        self._zz = self._zz * decay + z * z
        self._xz = self._xz * decay + x * z
        self._xy = self._xy * decay + x * y
        self._zy = self._zy * decay + z * y
        self._known = None

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(intercept, x_slope, z_slope); all 0 before the first observation."""
        if self._weight == 0.0:
            return 0.0, 0.0, 0.0
        if self._known is None:
            self._known = self._solved()
        return self._known

    def _solved(self) -> tuple[float, float, float]:
        weight = self._weight
        mean_x, mean_z, mean_y = self._x / weight, self._z / weight, self._y / weight
        part = mean_y / (1.0 + mean_x / self._typical_x + mean_z / self._typical_z)
        guess_x, guess_z = part / self._typical_x, part / self._typical_z
        # as if so much spread had been seen around the guesses
        spread_x = (_MIN_SPREAD * (mean_x + _MIN_SPREAD * self._typical_x)) ** 2 / weight
        spread_z = (_MIN_SPREAD * (mean_z + _MIN_SPREAD * self._typical_z)) ** 2 / weight
        xx = max(0.0, self._xx / weight - mean_x * mean_x) + spread_x
        zz = max(0.0, self._zz / weight - mean_z * mean_z) + spread_z
        xz = self._xz / weight - mean_x * mean_z
        xy = self._xy / weight - mean_x * mean_y + spread_x * guess_x
        zy = self._zy / weight - mean_z * mean_y + spread_z * guess_z
        slope_x, slope_z = _pair_of_slopes(xx, zz, xz, xy, zy)
        intercept = mean_y - slope_x * mean_x - slope_z * mean_z
        if intercept < 0.0:
            # through the origin, in the slopes' proportion
            scale = mean_y / (slope_x * mean_x + slope_z * mean_z)
            return 0.0, slope_x * scale, slope_z * scale
        return intercept, slope_x, slope_z


def _pair_of_slopes(xx: float, zz: float, xz: float, xy: float, zy: float) -> tuple[float, float]:
    """The two of least squares; where one would be below 0, it is 0 and the other stands alone."""
    determinant = xx * zz - xz * xz
    if determinant > 1e-9 * xx * zz:
        slope_x = (xy * zz - zy * xz) / determinant
        slope_z = (zy * xx - xy * xz) / determinant
        if slope_x >= 0.0 and slope_z >= 0.0:
            return slope_x, slope_z
        if slope_x < 0.0:
            return 0.0, max(0.0, zy / zz)
    return max(0.0, xy / xx), 0.0
