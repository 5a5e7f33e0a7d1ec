//! Matrix products on accelerators: who multiplies what.
//!
//! A library of products, if there is one and it is wanted ([`library`](super::library)), is asked first.
//! What it does not take goes to one of cubek's kernels:
//!
//! ```text
//! inputs                     inner dimension         kernel
//! bfloat16, or may round     a multiple of 256 (*)   burn's autotuner chooses, once a shape; remembered on
//!                                                    disk
//! bfloat16, or may round     another                 tensor cores, single-buffered
//! float32, exact             any                     plain cores
//!
//! (*) of 512 where either side is a vector; none if named kernels are asked for
//! ```
//!
//! The last two rows' kernels are launched by name, the next one if one fails when it is first used
//! ([`trial`](super::trial)). The second row is a matter of correctness. A double-buffered kernel of cubek
//! 0.2 reads an even number of stages along the inner dimension, and checks its bounds only where that is no
//! multiple of one stage: an odd number of whole stages (a LoRA rank of 16 is one) makes it multiply what
//! lies behind the end of each row. In dimensions of 128 and more stages are powers of two up to 128, so
//! multiples of 256 are an even number of any; kernels for vectors have one of 256, 32 lanes of 8 numbers.
//! All others are kept from such kernels. The autotuner does not know of this: its keys round dimensions to
//! powers of two.
//!
//! What this file does not do: batch, transpose or convert; strides say how matrices lie, and types have to
//! agree.

use burn::tensor::DType;
use burn_cubecl::{
    CubeRuntime,
    kernel::matmul::{MatmulStrategy, matmul},
    tensor::CubeTensor,
};
use cubek::{
    matmul::{
        components::tile::TileMatmulKind,
        definition::{MatmulElems, MatmulGlobalElems},
        launch::{Strategy, launch_ref},
        routines::{
            BlueprintStrategy, TileSizeSelection, simple::SimpleArgs, simple_unit::SimpleUnitSelectionArgs,
        },
    },
    std::InputBinding,
};

use super::{
    launch::{contiguous_as, empty},
    library::{self, Multiplier},
    pointwise::{Finish, finished},
    trial::{self, Class},
};
use crate::kernels::precision;

/// Twice the longest stage that a kernel reads along the inner dimension, of those that the autotuner tries
/// for matrices.
const FOR_MATRICES: usize = 256;
/// Twice the longest stage that a kernel reads along the inner dimension where one side is a single row or
/// column.
const FOR_VECTORS: usize = 512;

/// `x w` in float32, contiguous. Both `[.., n, k]` and `[.., k, o]`, of one type, batches alike.
pub fn product<R: CubeRuntime>(x: CubeTensor<R>, w: CubeTensor<R>) -> CubeTensor<R> {
    let out = room(&x, &w, DType::F32);
    multiplied(x, w, out)
}

/// [`product`] of matrices, finished: by the library on the way, where it does that.
pub fn product_finished<R: CubeRuntime>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    if !finish.rounded && !finish.is_nothing() {
        let out = room(&x, &w, DType::F32);
        let added = [finish.bias_o.as_ref(), finish.more_no.as_ref()];
        if library::finished([&x, &w, &out], added, precision::may_round()) {
            return out;
        }
    }
    finished(product(x, w), finish)
}

/// [`product`] in the type of both: added up in float32, and rounded once; contiguous.
pub fn product_rounded<R: CubeRuntime>(x: CubeTensor<R>, w: CubeTensor<R>) -> CubeTensor<R> {
    let out = room(&x, &w, x.dtype);
    if library::multiplied([&x, &w, &out], precision::may_round()) {
        return out;
    }
    contiguous_as(product(x, w), out.dtype)
}

fn room<R: CubeRuntime>(x: &CubeTensor<R>, w: &CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    let mut shape = x.meta.shape().clone();
    let last = shape.len() - 1;
    shape[last] = w.meta.shape()[last];
    empty(x, shape, dtype)
}

fn multiplied<R: CubeRuntime>(x: CubeTensor<R>, w: CubeTensor<R>, out: CubeTensor<R>) -> CubeTensor<R> {
    let (rank, inner) = (x.meta.num_dims(), x.meta.shape()[x.meta.num_dims() - 1]);
    let shape = out.meta.shape();
    let any_kernel = if shape[rank - 2..].contains(&1) { FOR_VECTORS } else { FOR_MATRICES };
    if library::multiplied([&x, &w, &out], precision::may_round()) {
        return out;
    }
    let on_tensor_cores = x.dtype != DType::F32 || precision::may_round();
    let may_tune = library::multiplier() != Multiplier::Named;
    if on_tensor_cores && may_tune && inner.is_multiple_of(any_kernel) {
        return matmul(x, w, Some(out), MatmulStrategy::default(), DType::F32)
            .expect("burn's autotuner ends with a kernel that takes anything");
    }
    let class = Class::from_sides([&x, &w, &out]);
    for (name, strategy) in candidates(on_tensor_cores) {
        if trial::launched(&out.client, name, &class, || launched(&strategy, &x, &w, &out)) {
            return out;
        }
    }
    panic!("no matmul kernel works on {:?}: the log has each kernel's error", out.device)
}

/// Kernels that are right for any inner dimension, best first. A device may lack what one needs, or a matrix
/// be too small for it.
fn candidates(on_tensor_cores: bool) -> impl Iterator<Item = (&'static str, Strategy)> {
    let simple = |tile_matmul| BlueprintStrategy::Inferred(SimpleArgs { multi_rows: true, tile_matmul });
    let rounded = on_tensor_cores.then(|| {
        let (mma, cmma) = (simple(TileMatmulKind::Mma), simple(TileMatmulKind::Cmma));
        [("mma", Strategy::SimpleCyclicMma(mma)), ("cmma", Strategy::SimpleCyclicCmma(cmma))]
    });
    let plain = SimpleUnitSelectionArgs { tile_size: TileSizeSelection::MaxTileSize };
    let unit = Strategy::SimpleUnit(BlueprintStrategy::Inferred(plain));
    rounded.into_iter().flatten().chain([("unit", unit), ("naive", Strategy::Naive)])
}

/// Whether this kernel takes these matrices; then it is on its way.
fn launched<R: CubeRuntime>(
    strategy: &Strategy,
    x: &CubeTensor<R>,
    w: &CubeTensor<R>,
    out: &CubeTensor<R>,
) -> bool {
    let (lhs, rhs) = (x.dtype.into(), w.dtype.into());
    let mut types = MatmulElems::from_globals(&MatmulGlobalElems { lhs, rhs, out: out.dtype.into() });
    let inputs = [x, w].map(|side| InputBinding::new(side.clone().binding(), side.dtype.into()));
    let [lhs, rhs] = inputs;
    let launched = launch_ref(strategy, &out.client, lhs, rhs, out.clone().binding(), &mut types);
    launched.inspect_err(|why| tracing::trace!(%strategy, ?why, "trying another kernel")).is_ok()
}
