//! Notes of a block's linear layers: what a run without a tape writes down, so that the run on a tape that
//! follows in the backward pass need not multiply again.
//!
//! ```text
//! call site says       written down when asked for   run again on a tape
//! Keep::Output         the output                    a node with that value; no product
//! Keep::Never          nothing                       everything
//! a half's last one    the low-rank inner product    nodes of it and of the sum, with values of no meaning;
//!                                                    no product
//! any with magnitudes  nothing                       everything
//! ```
//!
//! A node's backward pass needs a layer's input, its weight and the inner product of its update, never its
//! output, so a known value is as good as a computed one. The last product of half a block is added to the
//! stream of residuals, and the sum is kept as the next half's input: neither is needed again. Both runs call
//! the layers in the same order; that order is the notes' only key.
//!
//! An output that may be kept is rounded to the type it would be kept in ([`held`]), also where it is not
//! kept.
//!
//! What this file does not do: decide which layers are which ([`Keep`] stands at each call), or when notes
//! are taken (`model::recompute`).

use std::{cell::RefCell, collections::VecDeque};

use crate::dtypes::ActivationsDtype;
use burn::tensor::Tensor;

use super::{ParamId, decomposed, held};
use crate::kernels::{JoinedLayers, LinearLayer, LinearOps, ModelBackend, Residual, Tape};
use half::f16;

/// What selective recompute does with the output of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Kept: its product costs much for its size.
    Output,
    /// Computed again: it is large for what its product costs.
    Never,
}

/// One linear layer's note.
#[derive(Clone, Debug)]
struct Note<B: ModelBackend> {
    /// `[n, o]`, packed; none for the last layer of half a block.
    output_no: Option<Tensor<B, 2>>,
    /// `scale * x a^T`; none without an adapter.
    down_nr: Option<Tensor<B, 2>>,
}

/// What one run of half a block wrote down, in the order of its calls.
#[derive(Clone, Debug)]
pub struct Notes<B: ModelBackend>(VecDeque<Option<Note<B>>>);

impl<B: ModelBackend> Default for Notes<B> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

#[cfg(test)]
impl<B: ModelBackend> Notes<B> {
    /// Bytes of what is written down.
    pub fn bytes(&self) -> u64 {
        let of = |x: &Tensor<B, 2>| (x.dims().iter().product::<usize>() * x.dtype().size()) as u64;
        let note = |note: &Note<B>| note.output_no.iter().chain(&note.down_nr).map(of).sum::<u64>();
        self.0.iter().flatten().map(note).sum()
    }
}

/// Whether a scope writes notes, reads them, or neither.
#[derive(Debug)]
pub(super) enum Notebook<B: ModelBackend> {
    /// Every layer computes.
    Closed,
    /// Every layer computes and writes: last layers always, outputs if so.
    Writing { outputs: bool, notes: RefCell<Notes<B>> },
    /// Layers with a note take it.
    Reading(RefCell<Notes<B>>),
}

/// A linear layer, and the parameter that its weight is, if it trains.
#[derive(Clone, Debug)]
pub struct NotedLinear<T: Tape> {
    /// The layer.
    pub layer: LinearLayer<T>,
    /// What its weight's gradient is left for ([`ParamScope::collect`](super::ParamScope::collect)).
    pub weight: Option<ParamId>,
    /// Magnitudes of a layer with an update, where that changes directions alone (DoRA), `[o]`.
    pub magnitude_o: Option<Tensor<T, 1>>,
}

impl<T: Tape> From<LinearLayer<T>> for NotedLinear<T> {
    fn from(layer: LinearLayer<T>) -> Self {
        Self { layer, weight: None, magnitude_o: None }
    }
}

/// A linear layer and what it reads: `x [n, i]`.
pub struct LinearInputs<T: Tape> {
    /// Input.
    pub x_ni: Tensor<T, 2>,
    /// The layer.
    pub layer: NotedLinear<T>,
}

/// Takes what a weight's gradient is made of.
pub(super) type Leave<B> = Box<dyn FnOnce(Tensor<B, 2>, Tensor<B, 2>) + Send>;

/// A linear layer whose weight is frozen, or leaves its gradient.
pub(super) struct LeavingLinear<T: Tape> {
    pub layer: LinearLayer<T>,
    pub leave: Option<Leave<T::Base>>,
    pub magnitude_o: Option<Tensor<T, 1>>,
}

impl<T: Tape> LeavingLinear<T> {
    /// Layers of one input: those of nothing but a frozen weight and its update together, each other by
    /// itself.
    fn compute_all(x_ni: Tensor<T, 2>, layers: Vec<Self>) -> Vec<Tensor<T, 2>> {
        if layers.iter().all(Self::is_plain) {
            return T::linears(x_ni, layers.into_iter().map(|layer| layer.layer).collect());
        }
        let mut together = T::linears(x_ni.clone(), plain(&layers)).into_iter();
        let each = layers.into_iter().map(|layer| match layer.is_plain() {
            true => together.next().expect("one for each"),
            false => layer.compute_alone(x_ni.clone()),
        });
        each.collect()
    }

    /// Layers of one input as [`compute_all`](Self::compute_all), and what a run on a tape would want of
    /// them.
    fn compute_all_noting(x_ni: Tensor<T, 2>, layers: Vec<Self>) -> Vec<LinearOutput<T>> {
        if layers.iter().all(Self::is_plain) {
            return T::linears_saving(x_ni, layers.into_iter().map(|layer| layer.layer).collect());
        }
        let mut together = T::linears_saving(x_ni.clone(), plain(&layers)).into_iter();
        let each = layers.into_iter().map(|layer| match layer.is_plain() {
            true => together.next().expect("one for each"),
            false => (layer.compute_alone(x_ni.clone()), None),
        });
        each.collect()
    }

    fn is_plain(&self) -> bool {
        self.leave.is_none() && self.magnitude_o.is_none()
    }

    fn compute_alone(self, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        let LinearLayer { w_oi, bias_o, update } = self.layer;
        match (self.leave, self.magnitude_o) {
            (Some(leave), _) => {
                let w_oi = w_oi.into_tensor(&x_ni.device());
                T::linear_leaving_weight(x_ni, w_oi, bias_o, leave)
            }
            (None, Some(m_o)) => decomposed::linear(x_ni, LinearLayer { w_oi, bias_o, update }, m_o),
            (None, None) => <T as LinearOps>::linear(x_ni, w_oi, bias_o),
        }
    }

    /// `residual` plus the layer.
    fn compute_residual(self, residual: Residual<T>, x_ni: Tensor<T, 2>) -> Tensor<T, 2> {
        if self.magnitude_o.is_some() {
            return residual.plus(self.compute_alone(x_ni));
        }
        let LinearLayer { w_oi, bias_o, update } = self.layer;
        match (self.leave, update) {
            (Some(leave), _) => {
                let w_oi = w_oi.into_tensor(&x_ni.device());
                T::linear_leaving_weight_residual(residual, x_ni, w_oi, bias_o, leave)
            }
            (None, Some(update)) => T::lora_linear_residual(residual, x_ni, w_oi, bias_o, update),
            (None, None) => T::linear_residual(residual, x_ni, w_oi, bias_o),
        }
    }

    /// `residual` plus the layer, and what a run on a tape would want of it.
    fn compute_residual_noting(
        self,
        residual: Residual<T>,
        x_ni: Tensor<T, 2>,
    ) -> (Tensor<T, 2>, Note<T::Base>) {
        let LinearLayer { w_oi, bias_o, update } = self.layer;
        let (sum_no, down_nr) = match (self.leave, update) {
            (Some(leave), _) => {
                let w_oi = w_oi.into_tensor(&x_ni.device());
                (T::linear_leaving_weight_residual(residual, x_ni, w_oi, bias_o, leave), None)
            }
            (None, Some(update)) => {
                let (sum_no, down_nr) = T::lora_linear_residual_saving(residual, x_ni, w_oi, bias_o, &update);
                (sum_no, Some(T::lower(down_nr)))
            }
            (None, None) => (T::linear_residual(residual, x_ni, w_oi, bias_o), None),
        };
        (sum_no, Note { output_no: None, down_nr })
    }

    /// The node of a layer with the value `y_no`.
    fn recall(
        self,
        x_ni: Tensor<T, 2>,
        y_no: Tensor<T::Base, 2>,
        down_nr: Option<Tensor<T::Base, 2>>,
    ) -> Tensor<T, 2> {
        let LinearLayer { w_oi, bias_o, update } = self.layer;
        if let Some(leave) = self.leave {
            let w_oi = w_oi.into_tensor(&x_ni.device());
            return T::linear_leaving_weight_cached(y_no, x_ni, w_oi, bias_o, leave);
        }
        match (update, down_nr) {
            (Some(update), Some(down_nr)) => {
                T::lora_linear_cached(x_ni, w_oi, update, (T::lift(y_no), T::lift(down_nr)))
            }
            _ => T::linear_cached(x_ni, w_oi, bias_o, T::lift(y_no)),
        }
    }
}

/// The layers that are computed together.
fn plain<T: Tape>(layers: &[LeavingLinear<T>]) -> Vec<LinearLayer<T>> {
    layers.iter().filter(|layer| layer.is_plain()).map(|layer| layer.layer.clone()).collect()
}

/// An output, and the inner product of its update.
type LinearOutput<T> = (Tensor<T, 2>, Option<Tensor<T, 2>>);

impl<B: ModelBackend> Notebook<B> {
    /// Linear layers of one input, computed or recalled; their outputs in the precision that `keep` and
    /// `dtype` ask for.
    pub fn linears<T: Tape<Base = B>>(
        &self,
        dtype: ActivationsDtype,
        x_ni: Tensor<T, 2>,
        layers: Vec<(Keep, LeavingLinear<T>)>,
    ) -> Vec<Tensor<T, 2>> {
        let made = |keep, y_no| if keep == Keep::Output { held::rounded(dtype, y_no) } else { y_no };
        let (keeps, layers): (Vec<Keep>, Vec<_>) = layers.into_iter().unzip();
        match self {
            Self::Closed => {
                let outputs = LeavingLinear::compute_all(x_ni, layers);
                keeps.into_iter().zip(outputs).map(|(keep, y_no)| made(keep, y_no)).collect()
            }
            Self::Writing { outputs, notes } => {
                let whole: Vec<bool> = layers.iter().map(|layer| layer.magnitude_o.is_none()).collect();
                let computed = LeavingLinear::compute_all_noting(x_ni, layers);
                let noted = keeps.into_iter().zip(whole).zip(computed);
                let noted = noted.map(|((keep, whole), (y_no, down_nr))| {
                    let y_no = made(keep, y_no);
                    let note = (*outputs && whole && keep == Keep::Output).then(|| Note {
                        output_no: Some(held::packed(dtype, T::lower(y_no.clone()))),
                        down_nr: down_nr.map(T::lower),
                    });
                    notes.borrow_mut().0.push_back(note);
                    y_no
                });
                noted.collect()
            }
            Self::Reading(notes) => {
                let known = |_: &LeavingLinear<T>| {
                    let note = notes.borrow_mut().0.pop_front().flatten();
                    note.and_then(|Note { output_no, down_nr }| Some((output_no?, down_nr)))
                };
                let known: Vec<_> = layers.iter().map(known).collect();
                let (mut unknown, mut recalled) = (Vec::new(), Vec::new());
                for (layer, note) in layers.into_iter().zip(known) {
                    match note {
                        Some(note) => recalled.push(Some((layer, note))),
                        None => {
                            unknown.push(layer);
                            recalled.push(None);
                        }
                    }
                }
                let mut computed = LeavingLinear::compute_all(x_ni.clone(), unknown).into_iter();
                let each = recalled.into_iter().zip(keeps).map(|(recalled, keep)| match recalled {
                    Some((layer, (y_no, down_nr))) => {
                        layer.recall(x_ni.clone(), held::unpacked(y_no), down_nr)
                    }
                    None => made(keep, computed.next().expect("one for each that is not known")),
                });
                each.collect()
            }
        }
    }

    /// Joined layers, computed or recalled. Kept, if outputs are, where that takes no more memory than the
    /// outputs that `keeps` asks for would by themselves; one launch makes all of them or none.
    pub fn joined<T: Tape<Base = B>>(
        &self,
        dtype: ActivationsDtype,
        x_ni: Tensor<T, 2>,
        keeps: &[Keep],
        layers: JoinedLayers<T>,
    ) -> Tensor<T, 2> {
        let kept = keeps.iter().zip(&layers.outputs).filter(|(keep, _)| **keep == Keep::Output);
        let asked = kept.map(|(_, outputs)| outputs).sum::<usize>() * held::bytes(dtype);
        let all = layers.outputs.iter().sum::<usize>();
        let rounded = layers.rounded;
        let keep = asked >= all * if rounded { size_of::<f16>() } else { held::bytes(dtype) };
        let made = |y_no| if keep && !rounded { held::rounded(dtype, y_no) } else { y_no };
        match self {
            Self::Closed => made(T::joined(x_ni, layers)),
            Self::Writing { outputs, notes } => {
                let (y_no, down_nr) = T::joined_saving(x_ni, &layers);
                let y_no = made(y_no);
                let packed = |y_no| if rounded { y_no } else { held::packed(dtype, y_no) };
                let note = (*outputs && keep).then(|| Note {
                    output_no: Some(packed(T::lower(y_no.clone()))),
                    down_nr: down_nr.map(T::lower),
                });
                notes.borrow_mut().0.push_back(note);
                y_no
            }
            Self::Reading(notes) => {
                let note = notes.borrow_mut().0.pop_front().flatten();
                match note.and_then(|Note { output_no, down_nr }| Some((output_no?, down_nr))) {
                    Some((y_no, down_nr)) => {
                        let y_no = if rounded { y_no } else { held::unpacked(y_no) };
                        T::joined_cached(x_ni, layers, (T::lift(y_no), down_nr.map(T::lift)))
                    }
                    None => made(T::joined(x_ni, layers)),
                }
            }
        }
    }

    /// `x` plus a linear layer of `x_ni`, the last of half a block.
    pub fn last<T: Tape<Base = B>>(
        &self,
        dtype: ActivationsDtype,
        x_no: Tensor<T, 2>,
        x_ni: Tensor<T, 2>,
        layer: LeavingLinear<T>,
    ) -> Tensor<T, 2> {
        match self {
            Self::Closed => layer.compute_residual(held::residual(dtype, x_no), x_ni),
            Self::Writing { notes, .. } => {
                let residual = held::residual(dtype, x_no);
                if layer.magnitude_o.is_some() {
                    notes.borrow_mut().0.push_back(None);
                    return layer.compute_residual(residual, x_ni);
                }
                let (sum_no, note) = layer.compute_residual_noting(residual, x_ni);
                notes.borrow_mut().0.push_back(Some(note));
                sum_no
            }
            Self::Reading(notes) => match notes.borrow_mut().0.pop_front().flatten() {
                Some(note) => {
                    // Any value of the right shape is as good as another.
                    let unread_no = T::lower(x_no.clone());
                    T::sum_unread(x_no, layer.recall(x_ni, unread_no, note.down_nr))
                }
                None => layer.compute_residual(held::residual(dtype, x_no), x_ni),
            },
        }
    }

    /// Whether a block runs again: the outputs of its halves are not read.
    pub fn is_reading(&self) -> bool {
        matches!(self, Self::Reading(_))
    }
}
