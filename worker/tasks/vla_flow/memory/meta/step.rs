//! One micro-batch, forward and backward, with sizes in place of tensors: the counterpart of
//! `Policy::forward_backward`.

use std::rc::Rc;

use coxswain_proto::run_spec::Recompute;

use super::{
    expert::{ExpertRun, ExpertShape},
    tape::{Heap, Widths},
    tower::{Ground, Input},
    vl::{VlRun, VlShape},
};

/// Everything that decides what one micro-batch holds.
#[derive(Clone, Debug)]
pub(in crate::vla_flow::memory) struct StepShape {
    pub vl: VlShape,
    pub expert: ExpertShape,
    pub recompute: Recompute,
    pub widths: Widths,
}

/// What one micro-batch holds at its worst moments, beyond what is there before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::vla_flow::memory) struct Micro {
    /// Peak of the forward pass.
    pub forward: u64,
    /// What the forward pass leaves for the backward pass.
    pub kept: u64,
    /// Peak of the backward pass, `kept` included.
    pub backward: u64,
    /// The largest buffer that a compute thread keeps for itself.
    pub scratch: u64,
}

/// Runs the step.
pub(in crate::vla_flow::memory) fn run(shape: &StepShape) -> Micro {
    let heap = Rc::new(Heap::default());
    let ground = Ground { heap: Rc::clone(&heap), widths: shape.widths };
    let vl = VlRun { ground: &ground, shape: &shape.vl, mode: shape.recompute };
    let ExpertShape { horizon, action, .. } = shape.expert;
    let draws = shape.expert.batch * shape.expert.repeats * horizon * action;
    let recompute = if shape.expert.repeats > 1 { shape.recompute } else { Recompute::None };
    let expert = ExpertRun { ground: &ground, shape: shape.expert, mode: recompute };

    let (hidden, trace) = vl.forward();
    // Noise, targets and the loss's gradient are host arithmetic, kept to the end.
    let noised = heap.take(4 * 3 * draws);
    let sensor = expert.sensor();
    let sensor_input = sensor.as_ref().map(|sensor| Input { value: sensor.output(), tracked: true });
    let hidden = Input { value: hidden, tracked: trace.trains() };
    let (velocity, expert_trace) = expert.forward(hidden, sensor_input);
    let loss = heap.take(4 * 2 * draws);
    drop(velocity);
    let (forward, kept) = (heap.peak(), heap.live());

    heap.restart_peak();
    let dv = heap.take(4 * draws);
    let [dhidden, dsensor] = ExpertRun::backward(expert_trace, dv);
    if let (Some(sensor), Some(dsensor)) = (sensor, dsensor) {
        sensor.backward(dsensor);
    }
    if let Some(dhidden) = dhidden {
        vl.backward(trace, dhidden);
    }
    drop((noised, loss));
    Micro { forward, kept, backward: heap.peak(), scratch: heap.largest_scratch() }
}

/// Runs the vision-language model forward alone: the peak of computing features at the end of `vl`, and of
/// holding them in host memory.
pub(in crate::vla_flow::memory) fn run_below(vl: &VlShape, widths: Widths) -> u64 {
    let heap = Rc::new(Heap::default());
    let ground = Ground { heap: Rc::clone(&heap), widths };
    let (hidden, trace) = VlRun { ground: &ground, shape: vl, mode: Recompute::None }.forward();
    drop(trace);
    let kept = heap.take(widths.each * vl.tokens * vl.width);
    drop((hidden, kept));
    heap.peak()
}
