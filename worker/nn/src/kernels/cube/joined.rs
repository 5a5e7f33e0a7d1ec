//! Linear layers of one input whose weights lie together: one product for all of them, forward and backward,
//! and one launch of each kernel beside it.
//!
//! ```text
//! forward   down = scale x a^T      y = x w^T + down b^T + bias
//! backward  ddown = scale dy b      dx = dy w + ddown a + sum     da = ddown^T x     db = dy^T down
//! ```
//!
//! `x`, `dy`, and what is between them, `down` and `ddown`, are of the weights' type, as under autocast, so
//! that the products of gradients are of one type; `a` and `b` are read as they are, in float32. `da` is the
//! rows of all updates in one matrix. `db` is more than is asked for: rows of one layer by ranks of all, of
//! which a layer's are a block. At ranks as these the rest of it costs a few hundredths of the product `dx`,
//! and a launch for each layer is saved.

use burn::tensor::{DType, Tensor};
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};

use super::{
    launch::{contiguous_as, floats, narrowed, primitive, wrapped},
    low_rank::{self, Factor, ScaledFactor},
    pointwise::{self, Finish},
    product::{product, product_finished, product_rounded},
};
use crate::kernels::{JoinedGradients, JoinedLayers, JoinedSaved, LowRank, ModelBackend};

/// Ranks of all updates together, which a unit of a kernel holds: more would not stay in its registers.
const MOST_RANKS: usize = 128;

/// Whether there are kernels for all of these updates together.
pub fn fits<B, R>(layers: &JoinedLayers<B>) -> bool
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let ranks: Vec<usize> = layers.updates.iter().map(|update| update.a_ri.dims()[0]).collect();
    let fit =
        |update: &LowRank<B>| update.dropout.is_none() && reducing(update).0.fits() && raising(update).fits();
    ranks.windows(2).all(|pair| pair[0] == pair[1])
        && ranks.iter().sum::<usize>() <= MOST_RANKS
        && layers.updates.iter().all(fit)
}

/// See [`LinearOps::joined_saving`](crate::kernels::LinearOps::joined_saving).
pub fn forward<B, R>(x_ni: Tensor<B, 2>, layers: &JoinedLayers<B>) -> (Tensor<B, 2>, Option<Tensor<B, 2>>)
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let w = primitive(layers.w_oi.clone().into_tensor(&x_ni.device()).transpose());
    let x = contiguous_as(primitive(x_ni), w.dtype);
    let finish = Finish { bias_o: layers.bias_o.clone().map(floats), ..Finish::default() };
    if layers.updates.is_empty() && !layers.rounded {
        return (wrapped(product_finished(x, w, finish)), None);
    }
    let y = if layers.rounded { product_rounded(x.clone(), w) } else { product(x.clone(), w) };
    if layers.updates.is_empty() {
        return (wrapped(pointwise::finished(y, finish)), None);
    }
    let (downs, ups) = (layers.updates.iter().map(reducing), layers.updates.iter().map(raising));
    let down = low_rank::reduced_side_by_side(x, downs.collect());
    (wrapped(low_rank::raised(y, down.clone(), ups.collect(), finish)), Some(wrapped(down)))
}

/// See [`LinearOps::joined_backward`](crate::kernels::LinearOps::joined_backward).
pub fn backward<B, R>(
    saved: JoinedSaved<B>,
    dy_no: Tensor<B, 2>,
    wants_dx: bool,
    sum_ni: Option<Tensor<B, 2>>,
) -> JoinedGradients<B>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let JoinedSaved { x_ni, down_nr, layers } = saved;
    let (dtype, device) = (layers.w_oi.dtype().unwrap_or(DType::F32), x_ni.device());
    let dy: CubeTensor<R> = contiguous_as(primitive(dy_no), dtype);
    let finish = Finish { more_no: sum_ni.map(floats), ..Finish::default() };
    let w = || primitive(layers.w_oi.clone().into_tensor(&device));
    let Some(down_nr) = down_nr else {
        let dx = wants_dx.then(|| product_finished(dy, w(), finish));
        return JoinedGradients { dx_ni: dx.map(wrapped), updates: Vec::new() };
    };
    let downs = layers.updates.iter().map(|update| (raising(update), update.scale));
    let ddown = low_rank::reduced_side_by_side(dy.clone(), downs.collect());
    let dx_ni = wants_dx.then(|| {
        let ups = layers.updates.iter().map(|update| reducing(update).0);
        let dense = product(dy.clone(), w());
        wrapped(low_rank::raised(dense, ddown.clone(), ups.collect(), finish))
    });
    let transposed = |x: CubeTensor<R>| -> CubeTensor<R> { primitive(wrapped::<B, R, 2>(x).transpose()) };
    let da = product(transposed(ddown), contiguous_as(primitive(x_ni), dtype));
    let db = product(transposed(dy), primitive(down_nr));
    let (mut row, rank) = (0, layers.updates[0].a_ri.dims()[0]);
    let of_layer = |(number, &outputs): (usize, &usize)| {
        let ranks = [number * rank, rank];
        let rows = narrowed(db.clone(), 0, [row, outputs]);
        row += outputs;
        [wrapped(narrowed(da.clone(), 0, ranks)), wrapped(narrowed(rows, 1, ranks))]
    };
    JoinedGradients { dx_ni, updates: layers.outputs.iter().enumerate().map(of_layer).collect() }
}

/// What reduces the input of a layer, and its factor.
fn reducing<B, R>(update: &LowRank<B>) -> ScaledFactor<R>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    (Factor::a(floats(update.a_ri.clone())), update.scale)
}

/// What raises that to its output.
fn raising<B, R>(update: &LowRank<B>) -> Factor<R>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    Factor::b(floats(update.b_or.clone()))
}
