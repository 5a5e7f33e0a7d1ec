//! Buffers in use: who owns them, and the most bytes that there were. And the arithmetic so far.

use std::collections::HashMap;

use burn::tensor::{DType, Shape};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};

use super::{
    pages::{Allocation, Allocations},
    products,
};

/// What is in use, and the most that ever was.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    tensors: HashMap<TensorId, BufferUse>,
    stores: HashMap<u64, Store>,
    next: u64,
    /// Whether results lie as on a GPU; else as on a CPU.
    pub gpu: bool,
    /// Bytes in use.
    pub live: u64,
    /// The most so far.
    pub peak: u64,
    /// The largest buffer of a compute thread.
    pub scratch: u64,
    /// Multiplications and additions so far.
    pub flops: u64,
    /// What was taken and given back of a GPU's memory.
    pub allocations: Allocations,
}

#[derive(Clone, Copy, Debug)]
struct BufferUse {
    store: u64,
    /// Contiguous from the store's first element on.
    whole: bool,
}

#[derive(Debug)]
struct Store {
    bytes: u64,
    tensors: u32,
}

pub(super) fn bytes_of(shape: &Shape, dtype: DType) -> u64 {
    (shape.num_elements() * dtype.size()) as u64
}

/// Where the result of an operation lies.
enum ResultPlace {
    /// In a buffer of its own.
    New,
    /// In that of the first input.
    View {
        /// From the first element on, contiguously.
        whole: bool,
    },
    /// Over an input that is not needed any more.
    InPlace,
}

impl Ledger {
    /// Forgets every tensor; ids are not used again.
    pub fn begin(&mut self, gpu: bool) {
        *self = Self { next: self.next, gpu, ..Self::default() };
    }

    /// A name that no tensor has had.
    pub fn name(&mut self) -> TensorId {
        self.next += 1;
        TensorId::new(self.next)
    }

    /// Lets the peak start again from what is in use.
    pub fn restart_peak(&mut self) {
        self.peak = self.live;
    }

    /// Books a buffer of its own for a tensor.
    pub fn allocate(&mut self, tensor: &TensorIr) {
        let bytes = bytes_of(&tensor.shape, tensor.dtype);
        self.next += 1;
        let store = self.next;
        self.stores.insert(store, Store { bytes, tensors: 1 });
        self.tensors.insert(tensor.id, BufferUse { store, whole: true });
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        self.note(Allocation::Taken(store, bytes));
    }

    fn note(&mut self, event: Allocation) {
        if self.gpu {
            self.allocations.0.push(event);
        }
    }

    /// Books bytes that are gone at once.
    pub fn transient(&mut self, bytes: u64) {
        self.peak = self.peak.max(self.live + bytes);
    }

    fn share(&mut self, of: TensorId, by: TensorId, whole: bool) {
        let held = self.tensors[&of];
        self.stores.get_mut(&held.store).expect("held").tensors += 1;
        self.tensors.insert(by, BufferUse { store: held.store, whole: whole && held.whole });
    }

    /// Drops a tensor, and its buffer with its last owner.
    pub fn release(&mut self, tensor: TensorId) {
        let Some(BufferUse { store, .. }) = self.tensors.remove(&tensor) else { return };
        let held = self.stores.get_mut(&store).expect("held");
        held.tensors -= 1;
        if held.tensors == 0 {
            self.live -= held.bytes;
            self.stores.remove(&store);
            self.note(Allocation::Released(store));
        }
    }

    fn place(&self, op: &OperationIr) -> ResultPlace {
        use BaseOperationIr as Base;
        match op {
            OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
                match base {
                    Base::Reshape(it) if self.tensors[&it.input.id].whole => {
                        ResultPlace::View { whole: true }
                    }
                    Base::SwapDims(it) => {
                        ResultPlace::View { whole: it.input.shape == it.out.shape && it.dim1 == it.dim2 }
                    }
                    Base::Permute(_) => ResultPlace::View { whole: false },
                    Base::Expand(it) => ResultPlace::View { whole: it.input.shape == it.out.shape },
                    Base::Slice(it) => ResultPlace::View { whole: it.tensor.shape == it.out.shape },
                    Base::SliceAssign(it) if self.is_alone(&it.tensor) => ResultPlace::InPlace,
                    Base::Cast(it) if it.input.dtype == it.out.dtype => ResultPlace::View { whole: true },
                    _ => ResultPlace::New,
                }
            }
            OperationIr::NumericFloat(_, numeric) => match numeric {
                NumericOperationIr::Add(it)
                | NumericOperationIr::Sub(it)
                | NumericOperationIr::Mul(it)
                | NumericOperationIr::Div(it)
                    if it.lhs.shape == it.rhs.shape && self.is_alone(&it.lhs) =>
                {
                    ResultPlace::InPlace
                }
                NumericOperationIr::AddScalar(it)
                | NumericOperationIr::SubScalar(it)
                | NumericOperationIr::MulScalar(it)
                | NumericOperationIr::DivScalar(it)
                    if self.is_alone(&it.lhs) =>
                {
                    ResultPlace::InPlace
                }
                _ => ResultPlace::New,
            },
            OperationIr::Float(_, float) => match float {
                FloatOperationIr::Exp(it)
                | FloatOperationIr::Log(it)
                | FloatOperationIr::Erf(it)
                | FloatOperationIr::Sqrt(it)
                | FloatOperationIr::Tanh(it)
                | FloatOperationIr::Recip(it)
                    if self.is_alone(&it.input) =>
                {
                    ResultPlace::InPlace
                }
                _ => ResultPlace::New,
            },
            OperationIr::Custom(it) => match it.id.as_str() {
                "part" => ResultPlace::View { whole: false },
                "lies" => ResultPlace::View { whole: true },
                "changed" if self.is_alone(it.inputs.last().expect("one")) => ResultPlace::InPlace,
                _ => ResultPlace::New,
            },
            _ => ResultPlace::New,
        }
    }

    /// Whether an operation may put its result in this input's place.
    fn is_alone(&self, input: &TensorIr) -> bool {
        let held = self.tensors[&input.id];
        input.status == TensorStatus::ReadWrite && held.whole && self.stores[&held.store].tensors == 1
    }

    /// Books what an operation makes, and drops the inputs that it was the last to read.
    pub fn run(&mut self, op: &OperationIr) {
        match op {
            OperationIr::Drop(tensor) => return self.release(tensor.id),
            // Of a tensor that is there.
            OperationIr::Init(_) => return,
            _ => {}
        }
        self.flops += products::of(op);
        match self.place(op) {
            ResultPlace::New => op.outputs().for_each(|output| self.allocate(output)),
            ResultPlace::View { whole } => {
                let (of, by) = (op.inputs().next(), op.outputs().next());
                self.share(of.expect("a view is of something").id, by.expect("one").id, whole);
            }
            ResultPlace::InPlace => {
                let of = match op {
                    OperationIr::Custom(it) => it.inputs.last(),
                    _ => op.inputs().next(),
                };
                self.share(of.expect("one").id, op.outputs().next().expect("one").id, true);
            }
        }
        for input in op.inputs().filter(|input| input.status == TensorStatus::ReadWrite) {
            self.release(input.id);
        }
    }
}
