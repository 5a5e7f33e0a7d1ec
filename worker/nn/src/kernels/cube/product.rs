//! Matrix products on accelerators: which of cubek's kernels multiplies what.
//!
//! ```text
//! inputs                     inner dimension         kernel
//! bfloat16, or may round     a multiple of 256 (*)   burn's autotuner chooses, once a shape; remembered on
//!                                                    disk
//! bfloat16, or may round     another                 tensor cores, single-buffered
//! float32, exact             any                     plain cores
//!
//! (*) of 512 where either side is a vector
//! ```
//!
//! The second row is a matter of correctness. A double-buffered kernel of cubek 0.2 reads an even number of
//! stages along the inner dimension, and checks its bounds only where that is no multiple of one stage: an
//! odd number of whole stages (a LoRA rank of 16 is one) makes it multiply what lies behind the end of each
//! row. In dimensions of 128 and more stages are powers of two up to 128, so multiples of 256 are an even
//! number of any; kernels for vectors have one of 256, 32 lanes of 8 numbers. All others are kept from such
//! kernels. The autotuner does not know of this: its keys round dimensions to powers of two.
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

use super::launch::empty;
use crate::kernels::precision;

/// Twice the longest stage that a kernel reads along the inner dimension, of those that the autotuner tries
/// for matrices.
const FOR_MATRICES: usize = 256;
/// The same where one side is a single row or column.
const FOR_VECTORS: usize = 512;

/// `x w` in float32, contiguous. Both `[.., n, k]` and `[.., k, o]`, of one type, batches alike.
pub fn product<R: CubeRuntime>(x: CubeTensor<R>, w: CubeTensor<R>) -> CubeTensor<R> {
    let (rank, inner) = (x.meta.num_dims(), x.meta.shape()[x.meta.num_dims() - 1]);
    let mut shape = x.meta.shape().clone();
    shape[rank - 1] = w.meta.shape()[rank - 1];
    let any_kernel = if shape[rank - 2..].contains(&1) { FOR_VECTORS } else { FOR_MATRICES };
    let out = empty(&x, shape, DType::F32);
    let on_tensor_cores = x.dtype != DType::F32 || precision::may_round();
    if on_tensor_cores && inner.is_multiple_of(any_kernel) {
        return matmul(x, w, Some(out), MatmulStrategy::default(), DType::F32)
            .expect("burn's autotuner ends with a kernel that takes anything");
    }
    for strategy in candidates(on_tensor_cores) {
        if launched(&strategy, &x, &w, &out) {
            return out;
        }
    }
    unreachable!("the last candidate takes anything")
}

/// Kernels that are right for any inner dimension, best first. A device may lack what one needs, or a matrix
/// be too small for it.
fn candidates(on_tensor_cores: bool) -> impl Iterator<Item = Strategy> {
    let simple = |tile_matmul| BlueprintStrategy::Inferred(SimpleArgs { multi_rows: true, tile_matmul });
    let rounded = on_tensor_cores.then(|| {
        let (mma, cmma) = (simple(TileMatmulKind::Mma), simple(TileMatmulKind::Cmma));
        [Strategy::SimpleCyclicMma(mma), Strategy::SimpleCyclicCmma(cmma)]
    });
    let plain = SimpleUnitSelectionArgs { tile_size: TileSizeSelection::MaxTileSize };
    let exact = [Strategy::SimpleUnit(BlueprintStrategy::Inferred(plain)), Strategy::Naive];
    rounded.into_iter().flatten().chain(exact)
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
    launched.inspect_err(|why| tracing::trace!(%strategy, ?why, "another kernel is tried")).is_ok()
}
