//! A library of matrix products, beside cubek's kernels.
//!
//! A vendor's library knows its GPUs better than kernels that are written for many. What it needs is named by
//! the device's runtime, which this crate does not know: so it is registered by the crate that does, once in
//! a process, and asked first.
//!
//! What it does not do: load a library, or order its work among the device's; that is what is registered.

use std::sync::OnceLock;

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::{
    device::{Device, DeviceId},
    server::Binding,
};

/// Who multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Multiplier {
    /// The registered library; what it does not take, as [`Multiplier::Tuned`].
    #[default]
    Library,
    /// cubek's kernels: the autotuner's choice where all of them are right, and the named ones elsewhere.
    Tuned,
    /// cubek's kernels that are named: nothing is measured, and the same bits come out of every process.
    Named,
}

/// A matrix, or matrices, in a device's memory.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The memory, from the first element on. Holding it, as this does, keeps no operation from changing it
    /// in place later.
    pub memory: Binding,
    /// The type of an element.
    pub dtype: DType,
    /// Axes of matrices, then rows and columns.
    pub shape: Vec<usize>,
    /// Elements from one to the next, axis by axis.
    pub strides: Vec<usize>,
}

/// `out = x w`, matrix by matrix.
#[derive(Clone, Debug)]
pub struct MatrixProduct {
    /// Where all three lie.
    pub device: DeviceId,
    /// `[.., n, k]`
    pub x: Matrix,
    /// `[.., k, o]`
    pub w: Matrix,
    /// `[.., n, o]`, of float32 or of the inputs' type.
    pub out: Matrix,
    /// Whether inputs of float32 may be rounded to tf32.
    pub may_round: bool,
    /// `[o]` of float32, added to every row of a float32 `out`.
    pub bias: Option<Matrix>,
    /// A matrix of `out`'s type that lies as it does, or where it does, and is added to it.
    pub more: Option<Matrix>,
}

/// A library that multiplies matrices on a device.
pub trait MatrixLibrary: Send + Sync {
    /// Has `out` filled, after all that the device was told before and before all that it will be told. False
    /// if it does not take such matrices; then nothing was begun.
    fn multiply(&self, product: MatrixProduct) -> bool;
}

static CHOSEN: OnceLock<(Multiplier, Option<Box<dyn MatrixLibrary>>)> = OnceLock::new();

/// Says who multiplies in this process, before the first product. Later calls change nothing.
pub fn choose(multiplier: Multiplier, library: Option<Box<dyn MatrixLibrary>>) {
    let _ = CHOSEN.set((multiplier, library));
}

/// Who multiplies.
pub(super) fn multiplier() -> Multiplier {
    CHOSEN.get().map_or(Multiplier::Tuned, |(multiplier, _)| *multiplier)
}

/// Has the library compute a product; false if there is none, if another is to multiply, or if it does not
/// take such matrices.
pub fn multiply(product: MatrixProduct) -> bool {
    library().is_some_and(|library| library.multiply(product))
}

/// The library, if it is to multiply.
fn library() -> Option<&'static dyn MatrixLibrary> {
    let (multiplier, library) = CHOSEN.get()?;
    library.as_deref().filter(|_| *multiplier == Multiplier::Library)
}

/// Whether there is a library that is to multiply.
pub(super) fn is_there() -> bool {
    library().is_some()
}

/// Has the library compute a product of burn's tensors, as [`multiply`] does.
pub(super) fn multiplied<R: CubeRuntime>(matrices: [&CubeTensor<R>; 3], may_round: bool) -> bool {
    finished(matrices, [None, None], may_round)
}

/// Has the library compute a product of burn's tensors with a bias and with what else is added, as
/// [`MatrixProduct`] has them.
pub(super) fn finished<R: CubeRuntime>(
    [x, w, out]: [&CubeTensor<R>; 3],
    added: [Option<&CubeTensor<R>>; 2],
    may_round: bool,
) -> bool {
    if !is_there() {
        return false;
    }
    let device = x.device.to_id();
    let [x, w, out] = [x, w, out].map(matrix);
    let [bias, more] = added.map(|added| added.map(matrix));
    multiply(MatrixProduct { device, x, w, out, may_round, bias, more })
}

fn matrix<R: CubeRuntime>(x: &CubeTensor<R>) -> Matrix {
    Matrix {
        memory: x.handle.clone().binding(),
        dtype: x.dtype,
        shape: x.meta.shape().to_vec(),
        strides: x.meta.strides().to_vec(),
    }
}
