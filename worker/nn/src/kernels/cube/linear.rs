//! Linear layers on accelerators: products, and the kernels around them (`low_rank`, `pointwise`).

use burn::tensor::{DType, Tensor};
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};

use super::{
    dropout,
    launch::{contiguous_as, floats, primitive, wrapped},
    low_rank::{self, Factor, Reduction},
    pointwise::{self, Finish},
    product::{product, product_finished},
};
use crate::kernels::{
    LinearLayer, LinearOps, LowRank, LowRankGradients, LowRankSaved, ModelBackend, Residual, Weight,
};

/// Layers of one input, and the inner products of their updates: the input is reduced by all updates in one
/// kernel, and rounded once.
pub fn together<B, R>(
    x_ni: Tensor<B, 2>,
    layers: Vec<LinearLayer<B>>,
) -> Vec<(Tensor<B, 2>, Option<Tensor<B, 2>>)>
where
    B: ModelBackend<
            FloatTensorPrimitive = CubeTensor<R>,
            IntTensorPrimitive = CubeTensor<R>,
            Device = R::Device,
        >,
    R: CubeRuntime,
{
    if layers.is_empty() {
        return Vec::new();
    }
    let narrow = layers[0].w_oi.dtype().and_then(low_rank::narrow);
    let narrow = narrow.filter(|dtype| layers.iter().all(|layer| layer.w_oi.dtype() == Some(*dtype)));
    // Each update that drops reads an input of its own.
    let whole = |layer: &LinearLayer<B>| layer.update.as_ref().is_none_or(|update| update.dropout.is_none());
    let updates: Option<Vec<_>> = layers.iter().map(|layer| layer.update.clone()).collect();
    let updates = updates.filter(|_| layers.iter().all(whole));
    let (downs, x_ni) = match updates {
        Some(updates) => {
            let ms = updates.into_iter().map(|LowRank { a_ri, scale, .. }| (Factor::a(floats(a_ri)), scale));
            let made = low_rank::reduced(floats(x_ni), ms.collect(), narrow, DType::F32);
            (made.downs.into_iter().map(Some).collect(), wrapped(made.x))
        }
        // None with an update, or some without.
        _ => {
            let rounds = narrow.filter(|_| layers.iter().all(|layer| layer.update.is_none()));
            let x_ni = match rounds.filter(|dtype| x_ni.dtype() != *dtype) {
                Some(dtype) => x_ni.cast(dtype),
                None => x_ni,
            };
            (vec![None; layers.len()], x_ni)
        }
    };
    let each = layers.into_iter().zip(downs).map(|(layer, down)| {
        let LinearLayer { w_oi, bias_o, update } = layer;
        match (update, down) {
            (Some(update), Some(down)) => {
                let w_oi = w_oi.into_tensor(&x_ni.device());
                let y = primitive(rounded_like(x_ni.clone(), w_oi.transpose()));
                let (b, finish) = (Factor::b(floats(update.b_or)), finish(None, bias_o));
                (wrapped(low_rank::added(y, down.clone(), b, finish)), Some(wrapped(down)))
            }
            (Some(update), None) => {
                let (y_no, down_nr) = B::lora_linear_saving(x_ni.clone(), w_oi, bias_o, &update);
                (y_no, Some(down_nr))
            }
            (None, _) => (<B as LinearOps>::linear(x_ni.clone(), w_oi, bias_o), None),
        }
    });
    each.collect()
}

/// What becomes of a layer's product.
pub fn finish<B, R>(residual: Option<Residual<B>>, bias_o: Option<Tensor<B, 1>>) -> Finish<R>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let rounded = residual.as_ref().is_some_and(|residual| residual.rounded);
    Finish { bias_o: bias_o.map(floats), more_no: residual.map(|residual| floats(residual.x_no)), rounded }
}

/// `x w`, finished; `x` is rounded as [`rounded_like`] does.
pub fn finished<B, R>(x_nk: Tensor<B, 2>, w_ko: Tensor<B, 2>, finish: Finish<R>) -> Tensor<B, 2>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let x_nk = if x_nk.dtype() == w_ko.dtype() { x_nk } else { x_nk.cast(w_ko.dtype()) };
    wrapped(product_finished(primitive(x_nk), primitive(w_ko), finish))
}

/// A layer with its update, finished, and `scale * x a^T`.
pub fn updated<B, R>(
    x_ni: Tensor<B, 2>,
    w_oi: Weight<B>,
    update: &LowRank<B>,
    finish: Finish<R>,
) -> (Tensor<B, 2>, Tensor<B, 2>)
where
    B: ModelBackend<
            FloatTensorPrimitive = CubeTensor<R>,
            IntTensorPrimitive = CubeTensor<R>,
            Device = R::Device,
        >,
    R: CubeRuntime,
{
    let [a, b] = [&update.a_ri, &update.b_or].map(|factor| floats(factor.clone()));
    let w = primitive(w_oi.into_tensor(&x_ni.device()).transpose());
    let x: CubeTensor<R> = as_read(x_ni, w.dtype, update);
    let read = update.dropout.as_ref().map(|dropout| dropout::dropped(x.clone(), dropout));
    let (m, raising, factor, dtype) = (Factor::a(a), Factor::b(b), update.scale, x.dtype);
    let made = low_rank::applied(x, w, Reduction { read, m, raising, factor, dtype }, finish);
    (wrapped(made.y), wrapped(made.down))
}

/// An input as a layer reads it: of the weight's type if it is so already, or if what dropout leaves of it is
/// written anyway; and else float32.
fn as_read<B, R>(x_ni: Tensor<B, 2>, weight: DType, update: &LowRank<B>) -> CubeTensor<R>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let narrows = x_ni.dtype() == weight || update.dropout.is_some();
    if narrows { contiguous_as(primitive(x_ni), weight) } else { floats(x_ni) }
}

/// Gradients of a layer with an update; that of its input is made, and finished, if it says how.
pub fn pulled<B, R>(saved: LowRankSaved<B>, dy_no: Tensor<B, 2>, dx: Option<Finish<R>>) -> LowRankGradients<B>
where
    B: ModelBackend<
            FloatTensorPrimitive = CubeTensor<R>,
            IntTensorPrimitive = CubeTensor<R>,
            Device = R::Device,
        >,
    R: CubeRuntime,
{
    let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
    let (weight, device) = (w_oi.dtype().unwrap_or(DType::F32), x_ni.device());
    // Of the input's type, as `down` is: what gradients are made of has one.
    let x = as_read::<B, R>(x_ni, weight, &update);
    let (dy, a, b) = (floats(dy_no), floats(update.a_ri), floats(update.b_or));
    let (dtype, narrow) = (x.dtype, low_rank::narrow(weight));
    let w = || primitive(w_oi.clone().into_tensor(&device));
    let (dx_ni, ddown, rounded) = match (dx, &update.dropout) {
        (Some(finish), None) => {
            let (m, raising, factor) = (Factor::b(b), Factor::a(a), update.scale);
            let reduction = Reduction { read: None, m, raising, factor, dtype };
            let made = low_rank::applied(dy.clone(), w(), reduction, finish);
            (Some(made.y), made.down, made.x)
        }
        (dx, dropout) => {
            let narrow = narrow.filter(|narrow| *narrow == dtype);
            let ms = vec![(Factor::b(b), update.scale)];
            let mut made = low_rank::reduced(dy.clone(), ms, narrow, dtype);
            let ddown = made.downs.remove(0);
            let dx = dx.zip(dropout.as_ref()).map(|(finish, dropout)| {
                // Of what was dropped no gradient comes back this way.
                let low = product(ddown.clone(), contiguous_as(a, dtype));
                let more_no = Some(dropout::dropped(low, dropout));
                let dense = product_finished(made.x.clone(), w(), Finish { more_no, ..Finish::default() });
                pointwise::finished(dense, finish)
            });
            (dx, ddown, made.x)
        }
    };
    let dy = if dtype == DType::F32 { dy } else { rounded };
    let x = match &update.dropout {
        Some(dropout) => dropout::dropped(x, dropout),
        None => x,
    };
    LowRankGradients {
        dx_ni: dx_ni.map(wrapped),
        da_ri: B::linear_weight_gradient(wrapped(ddown), wrapped(x)),
        db_or: B::linear_weight_gradient(wrapped(dy), down_nr),
    }
}

/// `x w`. Where `w` is narrower, `x` is rounded to its type: the weight of a layer is read once and copied
/// never.
pub fn rounded_like<B: ModelBackend>(x_nk: Tensor<B, 2>, w_ko: Tensor<B, 2>) -> Tensor<B, 2> {
    let narrow = w_ko.dtype();
    B::product(if x_nk.dtype() == narrow { x_nk } else { x_nk.cast(narrow) }, w_ko)
}
