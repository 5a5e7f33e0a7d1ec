//! What a low-rank update adds to a matrix product, in two kernels beside the product instead of five around
//! it.
//!
//! ```text
//! reduced   x m, times a factor, and x rounded for the product beside it, while x is read once
//! raised    y + bias + (x m) m' + more, where the product y lies
//! ```
//!
//! Forward `m` is `a^T` and `m'` is `b^T`; backward they are `b` and `a`. Sums are float32 and products
//! exact, whatever tensor cores round. That is for ranks of 8, 16, 32 and 64, and sides of whole vectors. All
//! others are products of their own ([`product`]), which may round.
//!
//! Where the layer's input is of half precision already, so is `x m`, as under autocast: what gradients are
//! made of has one type then. There a library of products, where there is one, does most of both
//! ([`halves`]). Layers that are joined (`joined`) have one launch of each kernel for all of their updates:
//! what they reduce lies side by side, and each raises its own columns.

mod factor;
mod halves;
mod raise;
mod reduce;

use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, ops::numeric::mul_scalar, tensor::CubeTensor};
use cubecl::prelude::InputScalar;

pub use self::factor::{Factor, ScaledFactor};
use super::{
    launch::{contiguous_as, empty, len, width},
    pointwise::{Finish, finished},
    product::product,
};

/// A layer with its update, forward, or the gradient of its input.
pub struct LowRankProduct<R: CubeRuntime> {
    /// `x w + factor * (x m) m'`, finished.
    pub y: CubeTensor<R>,
    /// `factor * x m`.
    pub down: CubeTensor<R>,
    /// `x`, rounded if the product rounds it.
    pub x: CubeTensor<R>,
}

/// What an update does to the input of a product.
pub struct Reduction<R: CubeRuntime> {
    /// What it reads in the place of the input, which is of the weight's type: what dropout leaves of it.
    pub read: Option<CubeTensor<R>>,
    /// Reduces it.
    pub m: Factor<R>,
    /// Raises that to the output.
    pub raising: Factor<R>,
    /// What is between them.
    pub factor: f64,
    /// The type of what is reduced.
    pub dtype: DType,
}

/// `x [n, k]` of float32 or of the weight's type, contiguous; `w [k, o]`, to whose type `x` is rounded.
pub fn applied<R: CubeRuntime>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    update: Reduction<R>,
    finish: Finish<R>,
) -> LowRankProduct<R> {
    let Reduction { read, m, raising, factor, dtype } = update;
    let ms = vec![(m, factor)];
    let LowRankReduction { mut downs, x } = match read {
        Some(read) => LowRankReduction { x, ..reduced(read, ms, None, dtype) },
        None => reduced(x, ms, narrow(w.dtype), dtype),
    };
    let down = downs.remove(0);
    let y = product(x.clone(), w);
    LowRankProduct { y: added(y, down.clone(), raising, finish), down, x }
}

/// `y + down m'`, finished: `y` that has no other owner, in place.
pub fn added<R: CubeRuntime>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    raising: Factor<R>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    if raising.fits() {
        return raised(y, down, vec![raising], finish);
    }
    let low = product(contiguous_as(down, DType::F32), raising.raising());
    let Finish { bias_o, more_no, rounded } = finish;
    let y = finished(y, Finish { bias_o, more_no: Some(low), rounded: false });
    finished(y, Finish { bias_o: None, more_no, rounded })
}

/// The type that products with a weight of this one round to; none where they do not round.
pub fn narrow(weight: DType) -> Option<DType> {
    Some(weight).filter(|dtype| matches!(dtype, DType::BF16 | DType::F16))
}

/// What [`reduced`] makes.
pub struct LowRankReduction<R: CubeRuntime> {
    /// `factor * x m` `[n, r]` for each matrix.
    pub downs: Vec<CubeTensor<R>>,
    /// `x`, in the type that was asked for.
    pub x: CubeTensor<R>,
}

/// `factor * x m` `[n, r]` of `x [n, long]` for each matrix, in the type `down`: float32, or the half
/// precision of all of it. `x` of float32 is rounded to the type `narrow` if there is one; else it is of that
/// type already.
pub fn reduced<R: CubeRuntime>(
    x: CubeTensor<R>,
    ms: Vec<ScaledFactor<R>>,
    narrow: Option<DType>,
    down: DType,
) -> LowRankReduction<R> {
    let together = |(m, _): &ScaledFactor<R>| m.fits() && m.long_rows && m.rank() == ms[0].0.rank();
    if ms.len() > 1 && !ms.iter().all(together) {
        let (mut downs, mut first) = (Vec::new(), None);
        for m in ms {
            let made = reduced(x.clone(), vec![m], narrow.filter(|_| first.is_none()), down);
            downs.extend(made.downs);
            first.get_or_insert(made.x);
        }
        return LowRankReduction { downs, x: first.unwrap_or(x) };
    }
    if !ms.iter().all(|(m, _)| m.fits()) {
        let wide = contiguous_as(x.clone(), DType::F32);
        let made = |(m, factor): &ScaledFactor<R>| {
            let low = mul_scalar(product(wide.clone(), m.reducing()), InputScalar::new(*factor, DType::F32));
            contiguous_as(low, down)
        };
        let downs = ms.iter().map(made).collect();
        let x = match narrow.filter(|dtype| x.dtype != *dtype) {
            Some(dtype) => contiguous_as(x, dtype),
            None => x,
        };
        return LowRankReduction { downs, x };
    }
    // What is still to be rounded our kernel reads once, and a library would read twice.
    if narrow.is_none_or(|dtype| x.dtype == dtype)
        && down == x.dtype
        && ms.len() == 1
        && let Some(down) = halves::reduced(&x, &ms)
    {
        return LowRankReduction { downs: vec![down], x };
    }
    let rank = ms[0].0.rank();
    let rows = len(&x) / width(&x);
    let downs: Vec<_> = ms.iter().map(|_| empty(&x, [rows, rank].into(), down)).collect();
    let x = reduce::launch(x, ms, downs.clone(), narrow);
    LowRankReduction { downs, x }
}

/// `factor * x m` of all matrices side by side, `[n, rs]`, in the type of `x [n, long]`. Where `m` are rows,
/// each reduces all of `x`, and else its own columns, one matrix after the other. All of them fit, and are of
/// one rank.
pub fn reduced_side_by_side<R: CubeRuntime>(x: CubeTensor<R>, ms: Vec<ScaledFactor<R>>) -> CubeTensor<R> {
    if let Some(down) = halves::reduced(&x, &ms) {
        return down;
    }
    let (rows, ranks) = (len(&x) / width(&x), ms.len() * ms[0].0.rank());
    let down = empty(&x, [rows, ranks].into(), x.dtype);
    reduce::launch(x, ms, vec![down.clone()], None);
    down
}

/// `y + down m'`, finished in place: `y [n, long]` that has no other owner, `down [n, rs]`. Of several
/// matrices `[r, long]` all are raised and added; several `[long, r]` raise the columns of `y` that are their
/// own, one after the other. All of them fit, and are of one rank.
pub fn raised<R: CubeRuntime>(
    y: CubeTensor<R>,
    down: CubeTensor<R>,
    ms: Vec<Factor<R>>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    if halves::raised(&y, &down, &ms) { finished(y, finish) } else { raise::raised(y, down, ms, finish) }
}
