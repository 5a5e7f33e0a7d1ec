//! A heap that counts, values on it, and a tape of operations.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
};

/// Bytes in use, and the most there ever were.
#[derive(Debug, Default)]
pub(super) struct Heap {
    live: Cell<u64>,
    peak: Cell<u64>,
    /// The largest buffer that an operation needs on a compute thread while it runs; threads keep theirs.
    scratch: Cell<u64>,
}

impl Heap {
    /// A new value of `bytes`.
    pub fn take(self: &Rc<Self>, bytes: u64) -> Value {
        let live = self.live.get() + bytes;
        self.live.set(live);
        self.peak.set(self.peak.get().max(live));
        Value(Rc::new(Buffer { bytes, heap: Rc::clone(self) }))
    }

    /// An operation uses `bytes` on each compute thread while it runs.
    pub fn scratch(&self, bytes: u64) {
        self.scratch.set(self.scratch.get().max(bytes));
    }

    /// Most bytes in use so far.
    pub fn peak(&self) -> u64 {
        self.peak.get()
    }

    /// Bytes in use.
    pub fn live(&self) -> u64 {
        self.live.get()
    }

    /// The largest scratch buffer of a thread.
    pub fn largest_scratch(&self) -> u64 {
        self.scratch.get()
    }

    /// Lets the peak start again from what is in use.
    pub fn restart_peak(&self) {
        self.peak.set(self.live.get());
    }
}

/// Bytes on a heap, shared by clones, given back by the last of them.
#[derive(Clone, Debug)]
pub(super) struct Value(Rc<Buffer>);

#[derive(Debug)]
struct Buffer {
    bytes: u64,
    heap: Rc<Heap>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.heap.live.set(self.heap.live.get() - self.bytes);
    }
}

impl Value {
    /// Whether nobody else owns it: then an addition happens in place.
    fn is_unique(&self) -> bool {
        Rc::strong_count(&self.0) == 1
    }

    /// The sum of two values of one size, in place where the left one has no other owner.
    pub fn plus(self, other: Value) -> Value {
        let sum = if self.is_unique() { self } else { self.0.heap.take(self.0.bytes) };
        drop(other);
        sum
    }
}

/// A matrix on a tape: rows, columns, where its bytes are, and its node if it is tracked.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub rows: u64,
    pub cols: u64,
    pub value: Value,
    node: Option<usize>,
}

impl Matrix {
    /// The same elements in another shape, on the same node.
    pub fn reshaped(self, rows: u64, cols: u64) -> Self {
        debug_assert_eq!(self.rows * self.cols, rows * cols, "a reshape keeps the elements");
        Self { rows, cols, ..self }
    }

    pub fn is_tracked(&self) -> bool {
        self.node.is_some()
    }
}

/// Takes the gradient of an output to those of the inputs; dropping it gives back what the node kept.
type PullBack = Box<dyn FnOnce(&Rc<Heap>, Value) -> Vec<Option<Value>>>;

struct Node {
    depth: usize,
    parents: Vec<Option<usize>>,
    /// None for leaves.
    pull_back: Option<PullBack>,
}

/// Bytes of an activation's element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vla_flow::memory) struct Widths {
    /// As it is computed with.
    pub each: u64,
    /// As layer recompute keeps it.
    pub kept: u64,
}

/// Where operations run: recording, or keeping nothing.
pub(super) struct Tape {
    pub heap: Rc<Heap>,
    /// Bytes of an activation's element.
    pub each: u64,
    /// The same of one that is kept; fewer where it is rounded when it is made (`params::held`).
    pub kept: u64,
    recording: bool,
    nodes: RefCell<Vec<Node>>,
    /// What gradients of trained weights are made of, kept to the end of the backward pass.
    left: Rc<RefCell<Vec<Value>>>,
    pub notebook: Notebook,
}

/// What one linear layer's run without a tape leaves to the run on one: its output, the inner product of its
/// update.
#[derive(Default)]
pub(super) struct Note {
    pub output: Option<Value>,
    pub down: Option<Value>,
}

/// Notes of half a block, in the order of its linear layers.
pub(super) type Notes = VecDeque<Option<Note>>;

/// Whether a tape writes notes, reads them, or neither (`params::notes`).
#[derive(Default)]
pub(super) enum Notebook {
    #[default]
    Closed,
    Writing {
        outputs: bool,
        notes: RefCell<Notes>,
    },
    Reading(RefCell<Notes>),
}

impl Tape {
    /// A tape that records what depends on a leaf.
    pub fn recording(heap: &Rc<Heap>, widths: Widths) -> Self {
        Self {
            heap: Rc::clone(heap),
            each: widths.each,
            kept: widths.kept,
            recording: true,
            nodes: RefCell::default(),
            left: Rc::default(),
            notebook: Notebook::Closed,
        }
    }

    /// A tape that records nothing.
    pub fn plain(heap: &Rc<Heap>, widths: Widths) -> Self {
        Self { recording: false, ..Self::recording(heap, widths) }
    }

    /// A plain tape that takes notes: of outputs only if `outputs`.
    pub fn noting(heap: &Rc<Heap>, widths: Widths, outputs: bool) -> Self {
        let notebook = Notebook::Writing { outputs, notes: RefCell::default() };
        Self { notebook, ..Self::plain(heap, widths) }
    }

    /// A recording tape for half a block that has run before.
    pub fn recalling(heap: &Rc<Heap>, widths: Widths, notes: Notes) -> Self {
        Self { notebook: Notebook::Reading(RefCell::new(notes)), ..Self::recording(heap, widths) }
    }

    /// The notes taken.
    pub fn into_notes(self) -> Notes {
        match self.notebook {
            Notebook::Writing { notes, .. } => notes.into_inner(),
            Notebook::Closed | Notebook::Reading(_) => Notes::new(),
        }
    }

    /// A matrix of the given value.
    pub fn known(&self, rows: u64, cols: u64, value: Value) -> Matrix {
        Matrix { rows, cols, value, node: None }
    }

    /// A new matrix that no node made.
    pub fn matrix(&self, rows: u64, cols: u64) -> Matrix {
        Matrix { rows, cols, value: self.heap.take(self.each * rows * cols), node: None }
    }

    /// Whether what may be kept is rounded when it is made.
    pub fn rounds(&self) -> bool {
        self.kept < self.each
    }

    /// A matrix rounded where it lies, if nobody else has it.
    pub fn rounded(&self, x: Matrix) -> Matrix {
        if self.rounds() && !x.value.is_unique() { self.matrix(x.rows, x.cols) } else { x }
    }

    /// A matrix as it is kept: another value, where that is narrower.
    pub fn packed(&self, x: Matrix) -> Matrix {
        if !self.rounds() {
            return x;
        }
        Matrix { value: self.heap.take(self.kept * x.rows * x.cols), ..x }
    }

    /// A kept matrix as it is computed with.
    pub fn unpacked(&self, x: Matrix) -> Matrix {
        if self.rounds() { self.matrix(x.rows, x.cols) } else { x }
    }

    /// A matrix of values that exist already.
    pub fn constant(&self, matrix: &Matrix) -> Matrix {
        Matrix { node: None, ..matrix.clone() }
    }

    /// The same as a leaf, whose gradient is wanted.
    pub fn leaf(&self, matrix: &Matrix) -> Matrix {
        Matrix { node: self.add_leaf(), ..matrix.clone() }
    }

    /// The node of a trainable parameter, whose values live in the flat parameter buffer.
    pub fn parameter(&self) -> Option<usize> {
        self.add_leaf()
    }

    fn add_leaf(&self) -> Option<usize> {
        self.recording.then(|| self.push(Node { depth: 0, parents: Vec::new(), pull_back: None }))
    }

    fn push(&self, node: Node) -> usize {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(node);
        nodes.len() - 1
    }

    /// `output` as a function of `parents`; `pull_back` is dropped at once if none of them is tracked.
    pub fn record(
        &self,
        parents: Vec<Option<usize>>,
        output: Matrix,
        pull_back: impl FnOnce(&Rc<Heap>, Value) -> Vec<Option<Value>> + 'static,
    ) -> Matrix {
        let nodes = self.nodes.borrow();
        let depth = parents.iter().flatten().map(|&parent| nodes[parent].depth + 1).max();
        drop(nodes);
        let node =
            depth.map(|depth| self.push(Node { depth, parents, pull_back: Some(Box::new(pull_back)) }));
        Matrix { node, ..output }
    }

    /// Where the backward pass leaves values for its end.
    pub fn left(&self) -> Rc<RefCell<Vec<Value>>> {
        Rc::clone(&self.left)
    }

    /// Whether anything is kept for a backward pass.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The node of an input.
    pub fn node(matrix: &Matrix) -> Option<usize> {
        matrix.node
    }

    /// Runs the tape backwards from `root` with gradient `dy`; returns the gradient of each of `wanted`.
    ///
    /// As burn does it: deepest nodes first, each node given up after its step, gradients summed where they
    /// meet. Those of adapters stay until the end, and so does what those of trained weights are made of:
    /// these are made where they are summed.
    pub fn backward(self, root: Option<usize>, dy: Value, wanted: &[Option<usize>]) -> Vec<Option<Value>> {
        let mut nodes = self.nodes.into_inner();
        let mut gradients: Vec<Option<Value>> = nodes.iter().map(|_| None).collect();
        let Some(root) = root else { return wanted.iter().map(|_| None).collect() };
        gradients[root] = Some(dy);
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by_key(|&node| std::cmp::Reverse((nodes[node].depth, node)));
        for number in order {
            let Some(pull_back) = nodes[number].pull_back.take() else { continue };
            let Some(gradient) = gradients[number].take() else { continue };
            let of_parents = pull_back(&self.heap, gradient);
            for (parent, gradient) in nodes[number].parents.iter().zip(of_parents) {
                if let (&Some(parent), Some(gradient)) = (parent, gradient) {
                    gradients[parent] = Some(match gradients[parent].take() {
                        Some(sum) => gradient.plus(sum),
                        None => gradient,
                    });
                }
            }
        }
        wanted.iter().map(|node| node.and_then(|node| gradients[node].take())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_given_back_by_the_last_owner_and_the_peak_remembered() {
        let heap = Rc::new(Heap::default());
        let a = heap.take(10);
        let b = a.clone();
        drop(a);
        let c = heap.take(5);
        drop((b, c));
        assert_eq!((heap.live(), heap.peak()), (0, 15));
        heap.restart_peak();
        assert_eq!(heap.peak(), 0);
    }

    #[test]
    fn a_sum_is_in_place_unless_the_left_side_is_shared() {
        let heap = Rc::new(Heap::default());
        let sum = heap.take(8).plus(heap.take(8));
        assert_eq!((heap.live(), heap.peak()), (8, 16));
        let shared = sum.clone();
        let other = sum.plus(heap.take(8));
        assert_eq!((heap.live(), heap.peak()), (16, 24));
        drop((shared, other));
    }

    #[test]
    fn what_is_kept_narrower_is_another_value_and_what_is_not_the_same() {
        for (kept, bytes) in [(4, [24, 24, 24]), (2, [36, 12, 24])] {
            let heap = Rc::new(Heap::default());
            let tape = Tape::plain(&heap, Widths { each: 4, kept });
            let x = tape.matrix(2, 3);
            let packed = tape.packed(x.clone());
            let both = heap.live();
            drop(x);
            let alone = heap.live();
            let _x = tape.unpacked(packed);
            assert_eq!([both, alone, heap.live()], bytes);
        }
    }

    #[test]
    fn a_plain_tape_keeps_nothing_and_a_recording_one_until_its_backward_pass() {
        let heap = Rc::new(Heap::default());
        let widths = Widths { each: 1, kept: 1 };
        for (tape, kept) in [(Tape::plain(&heap, widths), 2), (Tape::recording(&heap, widths), 7)] {
            let x = tape.matrix(1, 2);
            let leaf = tape.leaf(&x);
            let saved = heap.take(5);
            let y = tape.record(vec![Tape::node(&leaf)], x.clone(), move |_, dy| {
                drop(saved);
                vec![Some(dy)]
            });
            assert_eq!(heap.live(), kept);
            let root = Tape::node(&y);
            let wanted = [Tape::node(&leaf)];
            drop((y, leaf));
            tape.backward(root, heap.take(2), &wanted);
            drop(x);
            assert_eq!(heap.live(), 0);
        }
    }
}
