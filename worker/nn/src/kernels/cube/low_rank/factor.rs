//! A matrix of a low-rank update, as the products on both sides of it see it.

use burn_cubecl::{CubeRuntime, ops::permute, tensor::CubeTensor};

use super::super::launch::len;

/// Elements of a vector.
pub(super) const VECTOR: usize = 4;
/// Lanes of a plane, as these kernels want them.
pub(super) const PLANE: usize = 32;

/// A matrix of an update, `[r, long]` or `[long, r]`.
pub struct Factor<R: CubeRuntime> {
    /// Elements, contiguous float32.
    pub values: CubeTensor<R>,
    /// Whether it is `[r, long]`: `a`, not `b`.
    pub long_rows: bool,
}

impl<R: CubeRuntime> Factor<R> {
    /// `a`, `[r, i]`.
    pub fn a(values: CubeTensor<R>) -> Self {
        Self { values, long_rows: true }
    }

    /// `b`, `[o, r]`.
    pub fn b(values: CubeTensor<R>) -> Self {
        Self { values, long_rows: false }
    }

    pub(super) fn rank(&self) -> usize {
        self.values.meta.shape()[if self.long_rows { 0 } else { 1 }]
    }

    pub(super) fn long(&self) -> usize {
        len(&self.values) / self.rank()
    }

    /// As the right side of a product that reduces: `[long, r]`.
    pub(super) fn reducing(&self) -> CubeTensor<R> {
        if self.long_rows { permute(self.values.clone(), &[1, 0]) } else { self.values.clone() }
    }

    /// As the right side of a product that raises: `[r, long]`.
    pub(super) fn raising(&self) -> CubeTensor<R> {
        if self.long_rows { self.values.clone() } else { permute(self.values.clone(), &[1, 0]) }
    }

    /// Whether the kernels here take it; what they do not is left to products.
    pub fn fits(&self) -> bool {
        let plane = self.values.client.properties().hardware.plane_size_max as usize;
        matches!(self.rank(), 8 | 16 | 32 | 64) && self.long().is_multiple_of(VECTOR) && plane == PLANE
    }
}

/// A matrix that reduces, and what it is multiplied with.
pub type ScaledFactor<R> = (Factor<R>, f64);
