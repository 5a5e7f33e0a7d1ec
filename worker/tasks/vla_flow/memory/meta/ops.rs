//! What each operation of `kernels` allocates, keeps for its backward pass, and gives back.
//!
//! Fused operations only: one output, no intermediates of full size. An operation takes its inputs by value
//! where the model moves them, because that is what decides when they die.

use std::rc::Rc;

use super::tape::{Heap, Matrix, Note, Notebook, Tape, Value};
use coxswain_nn::kernels::{FEW_TOKENS, PANEL_COLUMNS, QUERY_BLOCK};

/// Tokens up to which a linear layer transposes its input.
const FEW: u64 = FEW_TOKENS as u64;
/// Columns of a linear layer's output that a thread works on at a time.
const PANEL: u64 = PANEL_COLUMNS as u64;
/// Queries that a thread works on at a time.
const QUERIES: u64 = QUERY_BLOCK as u64;

/// A weight, and what of it trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) enum Weight {
    /// Frozen, without an adapter. Narrow: kept as bf16, converted in panels.
    Frozen { narrow: bool },
    /// Frozen, with an adapter of this rank.
    Adapted { rank: u64, narrow: bool },
    /// Trained, with or without a bias.
    Trained { bias: bool },
}

/// A linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) struct Linear {
    pub outputs: u64,
    pub weight: Weight,
}

/// What layer recompute does with a linear layer's output (`params::notes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// Kept by selective recompute.
    Output,
    /// Computed again.
    Never,
    /// Neither: nobody needs it again.
    Last,
}

impl Linear {
    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        !matches!(self.weight, Weight::Frozen { .. })
    }
}

/// Queries, keys and values, each `[n, heads * k]`.
pub(super) struct Heads {
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
}

/// What attention works on besides its inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionShape {
    /// Query heads.
    pub heads: u64,
    /// Keys that one query may see at most.
    pub keys: u64,
}

impl Tape {
    /// RMS norm or layer norm without parameters: keeps its input.
    pub fn norm(&self, x: &Matrix) -> Matrix {
        let y = self.matrix(x.rows, x.cols);
        let (saved, bytes) = (x.value.clone(), self.each * x.rows * x.cols);
        self.record(vec![Tape::node(x)], y, move |heap, _dy| {
            let dx = heap.take(bytes);
            drop(saved);
            vec![Some(dx)]
        })
    }

    /// AdaLN: keeps its input, and scales and shifts, whose gradients are made apart and then put side by
    /// side.
    pub fn modulated_norm(&self, x: &Matrix, ada: Matrix) -> Matrix {
        let y = self.matrix(x.rows, x.cols);
        let (dx, dada, parents) = (self.bytes(x), self.bytes(&ada), vec![Tape::node(x), Tape::node(&ada)]);
        let saved = (x.value.clone(), ada.value);
        self.record(parents, y, move |heap, _dy| {
            let [dx, halves, dada] = [dx, dada, dada].map(|bytes| heap.take(bytes));
            drop((halves, saved));
            vec![Some(dx), Some(dada)]
        })
    }

    /// An elementwise function of one input, which it keeps.
    pub fn pointwise(&self, x: Matrix) -> Matrix {
        let y = self.matrix(x.rows, x.cols);
        let (node, bytes, saved) = (Tape::node(&x), self.bytes(&x), x.value);
        self.record(vec![node], y, move |heap, _dy| {
            let dx = heap.take(bytes);
            drop(saved);
            vec![Some(dx)]
        })
    }

    /// `silu(gate) * up`: keeps both.
    pub fn swiglu(&self, gate: Matrix, up: Matrix) -> Matrix {
        let y = self.matrix(gate.rows, gate.cols);
        let (parents, bytes) = (vec![Tape::node(&gate), Tape::node(&up)], self.bytes(&gate));
        let saved = (gate.value, up.value);
        self.record(parents, y, move |heap, _dy| {
            let gradients = [bytes; 2].map(|bytes| Some(heap.take(bytes)));
            drop(saved);
            gradients.into()
        })
    }

    /// A rotary embedding: keeps nothing of its input.
    pub fn rotary(&self, x: Matrix) -> Matrix {
        let y = self.matrix(x.rows, x.cols);
        let bytes = self.bytes(&x);
        self.record(vec![Tape::node(&x)], y, move |heap, _dy| vec![Some(heap.take(bytes))])
    }

    /// Attention by blocks of queries: keeps its inputs, its output, and a logarithm per query and head.
    pub fn attention(&self, inputs: Heads, shape: AttentionShape) -> Matrix {
        let Heads { query, key, value } = inputs;
        let block = QUERIES.min(query.rows.max(1)) * shape.keys;
        self.heap.scratch(self.each * (block + QUERIES));
        let out = self.matrix(query.rows, query.cols);
        let lse = self.heap.take(self.each * query.rows * shape.heads);
        let parents = vec![Tape::node(&query), Tape::node(&key), Tape::node(&value)];
        if parents.iter().any(Option::is_some) {
            self.heap.scratch(2 * self.each * block);
        }
        let bytes = [self.bytes(&query), self.bytes(&key), self.bytes(&value)];
        let saved = (query.value, key.value, value.value, out.value.clone(), lse);
        self.record(parents, out, move |heap, _dout| {
            let gradients = bytes.map(|bytes| Some(heap.take(bytes)));
            drop(saved);
            gradients.into()
        })
    }

    /// `x + y`, where `x` has other owners: a new matrix; in the place of `y` where the sum is rounded in the
    /// same pass; `x` itself where the sum was made before, and nobody reads it again.
    pub fn residual(&self, x: &Matrix, y: Matrix) -> Matrix {
        let sum = match &self.notebook {
            Notebook::Reading(_) => self.constant(x),
            _ if self.rounds() => self.constant(&y),
            _ => self.matrix(x.rows, x.cols),
        };
        let parents = vec![Tape::node(x), Tape::node(&y)];
        self.record(parents, sum, |_, dy| vec![Some(dy.clone()), Some(dy)])
    }

    /// A linear layer with a frozen, adapted or trained weight.
    pub fn linear(&self, x: &Matrix, linear: Linear) -> Matrix {
        self.linear_saving(x, linear).0
    }

    /// The same, and the inner product of its update.
    fn linear_saving(&self, x: &Matrix, linear: Linear) -> (Matrix, Option<Value>) {
        let shape = [x.rows, x.cols, linear.outputs];
        self.linear_scratch(shape, linear.weight);
        // Few tokens: the input is transposed beside the output while the product is made.
        let _transposed = (x.rows <= FEW).then(|| self.heap.take(self.each * x.rows * x.cols));
        match linear.weight {
            Weight::Frozen { .. } => {
                let y = self.matrix(x.rows, linear.outputs);
                (self.frozen(x, y), None)
            }
            Weight::Adapted { rank, .. } => {
                let down = self.heap.take(self.each * x.rows * rank);
                let y = self.matrix(x.rows, linear.outputs);
                (self.adapted(x, y, down.clone(), rank), Some(down))
            }
            Weight::Trained { bias } => {
                let y = self.matrix(x.rows, linear.outputs);
                (self.trained(x, y, bias), None)
            }
        }
    }

    /// The node of a linear layer that has run before: its output as noted, or something that is there where
    /// nobody needs it.
    fn recall(&self, x: &Matrix, linear: Linear, note: Note) -> Matrix {
        let y = match note.output {
            Some(output) => self.unpacked(self.known(x.rows, linear.outputs, output)),
            None => self.known(x.rows, linear.outputs, self.heap.take(0)),
        };
        self.linear_scratch([x.rows, x.cols, linear.outputs], linear.weight);
        match (linear.weight, note.down) {
            (Weight::Adapted { rank, .. }, Some(down)) => self.adapted(x, y, down, rank),
            _ => self.frozen(x, y),
        }
    }

    /// A linear layer of a block that recompute runs: computed, noted or recalled.
    pub fn noted(&self, keep: Keep, x: &Matrix, linear: Linear) -> Matrix {
        match &self.notebook {
            Notebook::Closed => self.linear(x, linear),
            Notebook::Writing { outputs, notes } => {
                let wanted = *outputs && keep == Keep::Output;
                let (y, down) = self.linear_saving(x, linear);
                let note = Note { output: wanted.then(|| self.packed(y.clone()).value), down };
                let taken = wanted || keep == Keep::Last;
                notes.borrow_mut().push_back(taken.then_some(note));
                y
            }
            Notebook::Reading(notes) => match notes.borrow_mut().pop_front().flatten() {
                Some(note) => self.recall(x, linear, note),
                None => self.linear(x, linear),
            },
        }
    }

    /// [`noted`](Self::noted) of an input that nobody needs any more.
    pub fn noted_of(&self, keep: Keep, x: Matrix, linear: Linear) -> Matrix {
        self.noted(keep, &x, linear)
    }

    /// [`linear`](Self::linear) of an input that nobody needs any more.
    pub fn linear_of(&self, x: Matrix, linear: Linear) -> Matrix {
        self.linear(&x, linear)
    }

    /// `x` plus a trained layer of an input that nobody needs any more, the output of half a block.
    pub fn trained_residual(&self, x: &Matrix, input: Matrix, outputs: u64) -> Matrix {
        let weight = Weight::Trained { bias: true };
        let y = match &self.notebook {
            Notebook::Reading(_) => {
                self.linear_scratch([input.rows, input.cols, outputs], weight);
                self.trained(&input, self.known(input.rows, outputs, self.heap.take(0)), true)
            }
            _ => self.linear(&input, Linear { outputs, weight }),
        };
        drop(input);
        self.residual(x, y)
    }

    /// `x * sigmoid(x)`, as two operations that keep both.
    pub fn silu(&self, x: Matrix) -> Matrix {
        let gate = self.pointwise(x.clone());
        let y = self.matrix(x.rows, x.cols);
        let (parents, bytes) = (vec![Tape::node(&x), Tape::node(&gate)], self.bytes(&x));
        let saved = (x.value, gate.value);
        self.record(parents, y, move |heap, _dy| {
            let gradients = [bytes; 2].map(|bytes| Some(heap.take(bytes)));
            drop(saved);
            gradients.into()
        })
    }

    /// The part of a matrix's columns or rows as a copy (`narrow` and a reshape that it does not allow in
    /// place).
    pub fn copied_part(&self, x: &Matrix, rows: u64, cols: u64) -> Matrix {
        let part = self.matrix(rows, cols);
        self.record(vec![Tape::node(x)], part, self.widening(x))
    }

    /// Bytes of a matrix of activations.
    pub fn bytes(&self, x: &Matrix) -> u64 {
        self.each * x.rows * x.cols
    }

    /// The gradient of a part of `x`: zeros of the whole, with the part's gradient in its place.
    fn widening(&self, x: &Matrix) -> impl FnOnce(&Rc<Heap>, Value) -> Vec<Option<Value>> + 'static {
        let whole = self.bytes(x);
        move |heap, _dy| vec![Some(heap.take(whole))]
    }

    fn frozen(&self, x: &Matrix, y: Matrix) -> Matrix {
        let dx = self.bytes(x);
        self.record(vec![Tape::node(x)], y, move |heap, _dy| vec![Some(heap.take(dx))])
    }

    fn adapted(&self, x: &Matrix, y: Matrix, down: Value, rank: u64) -> Matrix {
        let outputs = y.cols;
        let wants_dx = x.is_tracked();
        let [dx, ddown, da, db] =
            [x.rows * x.cols, x.rows * rank, rank * x.cols, outputs * rank].map(|n| self.each * n);
        let saved = (x.value.clone(), down);
        let parents = vec![Tape::node(x), self.parameter(), self.parameter()];
        self.record(parents, y, move |heap, _dy| {
            let ddown = heap.take(ddown);
            let dx = wants_dx.then(|| heap.take(dx));
            let gradients = vec![dx, Some(heap.take(da)), Some(heap.take(db))];
            drop((ddown, saved));
            gradients
        })
    }

    fn trained(&self, x: &Matrix, y: Matrix, bias: bool) -> Matrix {
        let outputs = y.cols;
        let wants_dx = x.is_tracked();
        let [dx, db] = [x.rows * x.cols, outputs].map(|n| self.each * n);
        let (saved, left) = (x.value.clone(), self.left());
        let mut parents = vec![Tape::node(x), self.parameter()];
        parents.extend(bias.then(|| self.parameter()));
        self.record(parents, y, move |heap, dy| {
            let db = bias.then(|| heap.take(db));
            left.borrow_mut().extend([dy, saved]);
            vec![wants_dx.then(|| heap.take(dx)), None, db]
        })
    }

    /// Panels of the weight that a thread transposes or converts, forward and (where there is one) backward.
    fn linear_scratch(&self, [rows, inputs, outputs]: [u64; 3], weight: Weight) {
        let narrow = match weight {
            Weight::Frozen { narrow } | Weight::Adapted { narrow, .. } => narrow,
            Weight::Trained { .. } => false,
        };
        let panel = PANEL.min(outputs) * inputs;
        let buffer = if rows <= FEW { PANEL.min(outputs) * rows } else { panel };
        self.heap.scratch(4 * (buffer + if narrow { panel } else { 0 }));
        if self.is_recording() {
            self.heap.scratch(4 * PANEL.min(inputs) * outputs);
        }
    }
}
