//! Sensor encoder and action expert, with sizes in place of tensors: the counterpart of `model::expert` and
//! `model::sensor`.

use coxswain_proto::run_spec::Recompute;

use super::{
    ops::{AttentionShape, Heads, Linear, Weight},
    tape::{Matrix, Tape, Value},
    tower::{Ground, Input, Layer, Recorded, Tower, Trace},
};
use crate::vla_flow::expert::TIME_WIDTH;

/// The expert and the sensor encoder on one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) struct ExpertShape {
    pub width: u64,
    pub layers: u64,
    pub heads: u64,
    pub state: u64,
    pub action: u64,
    pub horizon: u64,
    /// Samples.
    pub batch: u64,
    /// Draws of each sample.
    pub repeats: u64,
    /// Prompt tokens of a sample, padding included.
    pub context_tokens: u64,
    /// The sensor encoder, if there is one.
    pub sensor: Option<SensorShape>,
}

/// The sensor encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) struct SensorShape {
    pub width: u64,
    pub tokens: u64,
    /// Values of one patch of readings.
    pub inputs: u64,
}

impl ExpertShape {
    fn tokens(&self) -> u64 {
        1 + self.sensor.map_or(0, |sensor| sensor.tokens) + self.horizon
    }

    fn draws(&self) -> u64 {
        self.batch * self.repeats
    }
}

fn dense(outputs: u64) -> Linear {
    Linear { outputs, weight: Weight::Trained { bias: true } }
}

/// One DiT block.
struct Block {
    shape: ExpertShape,
    cross: bool,
}

impl Layer for Block {
    fn attention(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let ExpertShape { width, heads, context_tokens, .. } = self.shape;
        let (x, cond, hidden) = (&inputs[0], &inputs[1], &inputs[2]);
        let ada = tape.linear(cond, dense(2 * width));
        let y = tape.modulated_norm(x, ada);
        let source = if self.cross { hidden } else { &y };
        let key = tape.linear(source, Linear { outputs: width, weight: Weight::Trained { bias: false } });
        let value = tape.linear(source, dense(width));
        let query = tape.linear_of(y, dense(width));
        let keys = if self.cross { context_tokens } else { self.shape.tokens() };
        let out = tape.attention(Heads { query, key, value }, AttentionShape { heads, keys });
        tape.trained_residual(x, out, width)
    }

    fn mlp(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let (x, width) = (&inputs[0], self.shape.width);
        let inner = tape.linear_of(tape.norm(x), dense(4 * width));
        tape.trained_residual(x, tape.pointwise(inner), width)
    }

    fn trains(&self) -> bool {
        true
    }
}

/// What a forward pass keeps.
pub(super) struct ExpertTrace<'a> {
    time: Recorded,
    tokens: Recorded,
    tower: Tower<'a, Block>,
    blocks: Trace,
    head: Recorded,
}

/// The expert under a recompute mode.
pub(super) struct ExpertRun<'a> {
    pub ground: &'a Ground,
    pub shape: ExpertShape,
    pub mode: Recompute,
}

impl<'a> ExpertRun<'a> {
    /// The sensor encoder's forward pass.
    pub fn sensor(&self) -> Option<Recorded> {
        let SensorShape { width, tokens, inputs } = self.shape.sensor?;
        let outputs = self.shape.width;
        let patches = self.ground.plain().matrix(self.shape.batch * tokens, inputs);
        Some(self.ground.record(Vec::new(), |tape, _| {
            let h = tape.linear_of(patches, dense(width));
            tape.linear_of(tape.pointwise(h), dense(outputs))
        }))
    }

    /// Predicts velocities from hidden states.
    pub fn forward(&self, hidden: Input, sensor: Option<Input>) -> (Matrix, ExpertTrace<'a>) {
        let shape = self.shape;
        let time = self.ground.record(Vec::new(), |tape, _| self.time(tape));
        let tokens =
            self.ground.record(sensor.into_iter().collect(), |tape, inputs| self.embed(tape, inputs));
        let tower = Tower {
            ground: self.ground,
            layers: (0..shape.layers).map(|index| Block { shape, cross: index.is_multiple_of(2) }).collect(),
            mode: self.mode,
            sides: vec![Input { value: time.output(), tracked: true }, hidden],
        };
        let (x, blocks) = tower.forward(tokens.output(), true);
        let inputs = [x, time.output()].map(|value| Input { value, tracked: true });
        let head = self.ground.record(inputs.into(), |tape, inputs| self.head(tape, inputs));
        (head.output(), ExpertTrace { time, tokens, tower, blocks, head })
    }

    /// Carries the gradient of the velocities back; returns those of hidden states and sensor tokens.
    pub fn backward(trace: ExpertTrace<'_>, dv: Value) -> [Option<Value>; 2] {
        let ExpertTrace { time, tokens, tower, blocks, head } = trace;
        let mut of_head = head.backward(dv).into_iter();
        let (dx, head_cond) = (of_head.next().flatten(), of_head.next().flatten());
        let Some(dx) = dx else { return [None, None] };
        let (dx, sides) = tower.backward(blocks, dx);
        let mut sides = sides.into_iter();
        let cond = match (sides.next().flatten(), head_cond) {
            (Some(cond), Some(head)) => Some(cond.plus(head)),
            (cond, head) => cond.or(head),
        };
        let hidden = sides.next().flatten();
        if let Some(cond) = cond {
            time.backward(cond);
        }
        let sensor = dx.and_then(|dx| tokens.backward(dx).into_iter().next().flatten());
        [hidden, sensor]
    }

    fn time(&self, tape: &Tape) -> Matrix {
        let width = self.shape.width;
        let sinusoids = tape.matrix(self.shape.draws(), TIME_WIDTH as u64);
        let h = tape.linear_of(sinusoids, dense(width));
        let h = tape.silu(h);
        let h = tape.linear_of(h, dense(width));
        tape.silu(h)
    }

    fn embed(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let ExpertShape { width, state, action, horizon, batch, .. } = self.shape;
        let state = tape.linear_of(tape.matrix(batch, state), dense(width));
        let action = tape.linear_of(tape.matrix(self.shape.draws() * horizon, action), dense(width));
        let parts: Vec<_> = [state].into_iter().chain(inputs.iter().cloned()).chain([action]).collect();
        let joined = tape.matrix(self.shape.draws() * self.shape.tokens(), width);
        let each = tape.each;
        let sizes: Vec<u64> = parts.iter().map(|part| each * part.rows * part.cols).collect();
        let nodes = parts.iter().map(Tape::node).chain([tape.parameter()]).collect();
        tape.record(nodes, joined, move |heap, _dy| {
            sizes.into_iter().map(|bytes| Some(heap.take(bytes))).collect()
        })
    }

    fn head(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix {
        let ExpertShape { width, action, horizon, .. } = self.shape;
        let x = tape.copied_part(&inputs[0], self.shape.draws() * horizon, width);
        let ada = tape.linear(&inputs[1], dense(2 * width));
        let y = tape.modulated_norm(&x, ada);
        drop(x);
        tape.linear_of(y, dense(action))
    }
}
