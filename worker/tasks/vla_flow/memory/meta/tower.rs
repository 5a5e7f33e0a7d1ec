//! Segments and recompute modes, with sizes in place of tensors: the counterpart of `model::recompute`.

use std::rc::Rc;

use coxswain_proto::run_spec::Recompute;

use super::tape::{Heap, Matrix, Notes, Tape, Value, Widths};

/// A block: two residual halves over `inputs[0]`, with the tower's side inputs after it.
pub(super) trait Layer {
    /// `x + attention(norm(x))`.
    fn attention(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix;

    /// `x + mlp(norm(x))`.
    fn mlp(&self, tape: &Tape, inputs: &[Matrix]) -> Matrix;

    /// Whether anything in it trains.
    fn trains(&self) -> bool;

    /// Bytes of frozen weights that are in memory only while it runs, or is next.
    fn streamed(&self) -> u64 {
        0
    }
}

/// An input of a segment.
#[derive(Clone)]
pub(super) struct Input {
    pub value: Matrix,
    pub tracked: bool,
}

/// A segment that has run forward on its own tape.
pub(super) struct Recorded {
    tape: Tape,
    inputs: Vec<Matrix>,
    output: Matrix,
}

/// Where everything runs: the heap, and the bytes of an activation's element.
#[derive(Clone)]
pub(super) struct Ground {
    pub heap: Rc<Heap>,
    pub widths: Widths,
}

impl Ground {
    /// A tape that keeps nothing.
    pub fn plain(&self) -> Tape {
        Tape::plain(&self.heap, self.widths)
    }

    /// Runs a segment on a tape of its own.
    pub fn record(&self, inputs: Vec<Input>, segment: impl FnOnce(&Tape, &[Matrix]) -> Matrix) -> Recorded {
        self.record_on(Tape::recording(&self.heap, self.widths), inputs, segment)
    }

    /// The same on a given tape.
    pub fn record_on(
        &self,
        tape: Tape,
        inputs: Vec<Input>,
        segment: impl FnOnce(&Tape, &[Matrix]) -> Matrix,
    ) -> Recorded {
        let leaf = |input: Input| match input.tracked {
            true => tape.leaf(&input.value),
            false => tape.constant(&input.value),
        };
        let inputs: Vec<_> = inputs.into_iter().map(leaf).collect();
        let output = segment(&tape, &inputs);
        Recorded { tape, inputs, output }
    }
}

impl Recorded {
    /// The output's value, as a constant.
    pub fn output(&self) -> Matrix {
        self.tape.constant(&self.output)
    }

    /// Carries the gradient of the output back; those of the inputs are returned, those of parameters given
    /// back.
    pub fn backward(self, dy: Value) -> Vec<Option<Value>> {
        let Self { tape, inputs, output } = self;
        let wanted: Vec<_> = inputs.iter().map(Tape::node).collect();
        let root = Tape::node(&output);
        drop(output);
        tape.backward(root, dy, &wanted)
    }
}

/// Blocks run one after another under one recompute mode.
pub(super) struct Tower<'a, L> {
    pub ground: &'a Ground,
    pub layers: Vec<L>,
    pub mode: Recompute,
    pub sides: Vec<Input>,
}

/// What one forward pass kept.
pub(super) struct Trace {
    kept: Vec<Kept>,
    first: usize,
    below_trains: bool,
}

/// What is kept of one layer: attention, MLP.
enum Kept {
    Inputs([(Matrix, Notes); 2]),
    Graphs(Box<[Recorded; 2]>),
}

/// What is kept of half a layer.
enum Half {
    Kept((Matrix, Notes)),
    Recorded(Recorded),
}

impl<L: Layer> Tower<'_, L> {
    /// Runs every layer and keeps what the mode says of those from the first that trains on.
    pub fn forward(&self, x: Matrix, below_trains: bool) -> (Matrix, Trace) {
        let first_trained = self.layers.iter().position(Layer::trains).unwrap_or(self.layers.len());
        let first = if below_trains { 0 } else { first_trained };
        let mut trace = Trace { kept: Vec::new(), first, below_trains };
        let (mut x, mut next) = (self.ground.plain().rounded(x), None);
        for index in 0..self.layers.len() {
            let _weights = self.fetched(&mut next, index, Some(index + 1));
            if index < first {
                x = self.plain(index, x);
                continue;
            }
            let (y, kept) = self.keep(index, x, below_trains || index > first);
            trace.kept.push(kept);
            x = y;
        }
        (x, trace)
    }

    /// Carries `dy` back; returns the gradients of the input and of the sides.
    pub fn backward(&self, trace: Trace, dy: Value) -> (Option<Value>, Vec<Option<Value>>) {
        let Trace { kept, first, below_trains } = trace;
        let mut sides: Vec<Option<Value>> = self.sides.iter().map(|_| None).collect();
        let (mut dy, mut next) = (Some(dy), None);
        for (offset, kept) in kept.into_iter().enumerate().rev() {
            let index = first + offset;
            let Some(gradient) = dy.take() else { break };
            let _weights = self.fetched(&mut next, index, offset.checked_sub(1).map(|offset| first + offset));
            let layer = &self.layers[index];
            let (attention, mlp) = match kept {
                Kept::Graphs(graphs) => {
                    let [attention, mlp] = *graphs;
                    (Half::Recorded(attention), Half::Recorded(mlp))
                }
                Kept::Inputs([attention, mlp]) => (Half::Kept(attention), Half::Kept(mlp)),
            };
            let mlp = self.again(mlp, true, |tape, inputs| layer.mlp(tape, inputs));
            let mut gradients = mlp.backward(gradient).into_iter();
            let dh = gradients.next().flatten();
            accumulate(&mut sides, gradients);
            let Some(dh) = dh else { break };
            let track = below_trains || index > first;
            let attention = self.again(attention, track, |tape, inputs| layer.attention(tape, inputs));
            let mut gradients = attention.backward(dh).into_iter();
            dy = gradients.next().flatten();
            accumulate(&mut sides, gradients);
        }
        (if below_trains { dy } else { None }, sides)
    }

    /// The weights of a layer that runs, if they are streamed; those of the one that follows it are read
    /// meanwhile.
    fn fetched(&self, next: &mut Option<Value>, index: usize, then: Option<usize>) -> Value {
        let read = |layer: &L| self.ground.heap.take(layer.streamed());
        let this = next.take().unwrap_or_else(|| read(&self.layers[index]));
        *next = then.and_then(|index| self.layers.get(index)).map(read);
        this
    }

    fn mode_of(&self, index: usize) -> Recompute {
        match self.mode {
            Recompute::Every(n) if index.is_multiple_of(n.max(1)) => Recompute::Full,
            Recompute::Every(_) => Recompute::None,
            mode => mode,
        }
    }

    fn keep(&self, index: usize, x: Matrix, track: bool) -> (Matrix, Kept) {
        let layer = &self.layers[index];
        let outputs = match self.mode_of(index) {
            Recompute::Full => false,
            Recompute::Selective => true,
            Recompute::None | Recompute::Every(_) => {
                let attention = self.ground.record(self.tracked(x, track), |t, i| layer.attention(t, i));
                let inputs = self.tracked(attention.output(), true);
                let mlp = self.ground.record(inputs, |t, i| layer.mlp(t, i));
                return (mlp.output(), Kept::Graphs(Box::new([attention, mlp])));
            }
        };
        let tape = self.ground.plain();
        let (h, of_attention) = self.note(x.clone(), outputs, |t, i| layer.attention(t, i));
        let attention = (tape.packed(x), of_attention);
        let (y, of_mlp) = self.note(h.clone(), outputs, |t, i| layer.mlp(t, i));
        (y, Kept::Inputs([attention, (tape.packed(h), of_mlp)]))
    }

    /// Half a block without a tape, taking notes.
    fn note(
        &self,
        x: Matrix,
        outputs: bool,
        half: impl FnOnce(&Tape, &[Matrix]) -> Matrix,
    ) -> (Matrix, Notes) {
        let tape = Tape::noting(&self.ground.heap, self.ground.widths, outputs);
        let y = half(&tape, &self.inputs(x));
        (y, tape.into_notes())
    }

    /// A half's graph: the one that was kept, or a new one from what was kept.
    fn again(&self, kept: Half, track: bool, half: impl FnOnce(&Tape, &[Matrix]) -> Matrix) -> Recorded {
        match kept {
            Half::Recorded(recorded) => recorded,
            Half::Kept((x, notes)) => {
                let tape = Tape::recalling(&self.ground.heap, self.ground.widths, notes);
                let x = tape.unpacked(x);
                self.ground.record_on(tape, self.tracked(x, track), half)
            }
        }
    }

    fn plain(&self, index: usize, x: Matrix) -> Matrix {
        let (tape, layer) = (self.ground.plain(), &self.layers[index]);
        let h = layer.attention(&tape, &self.inputs(x));
        layer.mlp(&tape, &self.inputs(h))
    }

    fn inputs(&self, x: Matrix) -> Vec<Matrix> {
        std::iter::once(x).chain(self.sides.iter().map(|side| side.value.clone())).collect()
    }

    fn tracked(&self, value: Matrix, tracked: bool) -> Vec<Input> {
        std::iter::once(Input { value, tracked }).chain(self.sides.iter().cloned()).collect()
    }
}

fn accumulate(sums: &mut [Option<Value>], gradients: impl Iterator<Item = Option<Value>>) {
    for (sum, gradient) in sums.iter_mut().zip(gradients) {
        *sum = match (sum.take(), gradient) {
            (Some(sum), Some(gradient)) => Some(sum.plus(gradient)),
            (sum, gradient) => sum.or(gradient),
        };
    }
}
