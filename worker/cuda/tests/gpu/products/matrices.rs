//! Matrices on the GPU, and their products on the host.

use std::{fmt, marker::PhantomData};

use burn::tensor::DType;
use coxswain_nn::kernels::matrix_library::Matrix;
use cubecl::{
    client::ComputeClient,
    cuda::CudaRuntime,
    ir::{ElemType, FloatKind, StorageType},
    prelude::TensorBinding,
    server::Handle,
};
use half::bf16;

/// Before and after every matrix lies this much that is NaN. As much as the allocator aligns by, several
/// times.
const GUARD: usize = 4096;
/// cubecl's rows begin at multiples of this where it places them itself.
const PITCH: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Bf16,
    Float,
}

impl Number {
    pub fn place(self) -> StorageType {
        let kind = match self {
            Self::Bf16 => FloatKind::BF16,
            Self::Float => FloatKind::F32,
        };
        ElemType::Float(kind).into()
    }

    fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Float => 4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    Rows,
    /// Rows with a gap between them.
    Pitched,
    Columns,
}

#[derive(Clone, Debug)]
pub struct Matrices {
    pub batch: usize,
    pub rows: usize,
    pub columns: usize,
    pub layout: Layout,
}

impl Matrices {
    /// Distances between matrices, rows and columns, and how many places all take.
    fn strides(&self, number: Number) -> ([usize; 3], usize) {
        let step = match self.layout {
            Layout::Rows => self.columns,
            Layout::Pitched => (self.columns * number.bytes() + 1).next_multiple_of(PITCH) / number.bytes(),
            Layout::Columns => self.rows,
        };
        let (matrix, rows) = match self.layout {
            Layout::Columns => (step * self.columns, [1, step]),
            _ => (step * self.rows, [step, 1]),
        };
        ([matrix, rows[0], rows[1]], matrix * self.batch)
    }
}

/// One product.
#[derive(Clone, Debug)]
pub struct Case {
    pub x: Matrices,
    pub w: Matrices,
}

impl Case {
    fn new([batch_x, batch_w]: [usize; 2], [m, n, k]: [usize; 3], layouts: [Layout; 2]) -> Self {
        let x = Matrices { batch: batch_x, rows: m, columns: k, layout: layouts[0] };
        Self { x, w: Matrices { batch: batch_w, rows: k, columns: n, layout: layouts[1] } }
    }

    pub fn out(&self) -> Matrices {
        let batch = self.x.batch.max(self.w.batch);
        Matrices { batch, rows: self.x.rows, columns: self.w.columns, layout: Layout::Rows }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { x, w } = self;
        write!(f, "[{}, {}, {}] {:?} by ", x.batch, x.rows, x.columns, x.layout)?;
        write!(f, "[{}, {}, {}] {:?}", w.batch, w.rows, w.columns, w.layout)
    }
}

/// Inner dimensions that are one stage, several, an odd number of them, and none; rows and columns that fill
/// tiles and that do not.
pub fn cases() -> Vec<Case> {
    use Layout::{Columns, Pitched, Rows};
    let mut all = Vec::new();
    for k in [8, 16, 24, 48, 64, 80, 96, 128, 256, 384, 512, 768, 1280, 2048] {
        all.push(Case::new([1, 1], [33, 100, k], [Rows, Rows]));
        all.push(Case::new([1, 1], [100, 33, k], [Columns, Pitched]));
        all.push(Case::new([2, 2], [64, 80, k], [Pitched, Columns]));
        if [16, 96, 256, 512, 768].contains(&k) {
            all.push(Case::new([1, 1], [1, 100, k], [Pitched, Columns]));
            all.push(Case::new([1, 1], [7, 1, k], [Rows, Rows]));
            all.push(Case::new([3, 1], [40, 72, k], [Pitched, Pitched]));
            all.push(Case::new([1, 1], [130, 264, k], [Pitched, Columns]));
        }
    }
    all
}

/// Numbers and the places where they lie on the GPU.
pub struct PlacedMatrices {
    matrices: Matrices,
    number: Number,
    values: Vec<f32>,
}

impl PlacedMatrices {
    /// Values between -1 and 1, as the type holds them.
    pub fn new(matrices: &Matrices, number: Number, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let value = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            if number == Number::Bf16 { bf16::from_f32(value).to_f32() } else { value }
        };
        let count = matrices.batch * matrices.rows * matrices.columns;
        Self { matrices: matrices.clone(), number, values: (0..count).map(|_| next()).collect() }
    }

    /// What a product is written to.
    pub fn nothing(matrices: &Matrices, number: Number) -> Self {
        let count = matrices.batch * matrices.rows * matrices.columns;
        Self { matrices: matrices.clone(), number, values: vec![f32::NAN; count] }
    }

    fn value(&self, batch: usize, row: usize, column: usize) -> f64 {
        let Matrices { batch: batches, rows, columns, .. } = self.matrices;
        f64::from(self.values[((batch % batches) * rows + row) * columns + column])
    }

    pub fn upload(&self, client: &ComputeClient<CudaRuntime>) -> UploadedMatrices {
        let (strides, places) = self.matrices.strides(self.number);
        let width = self.number.bytes();
        // NaN in either type.
        let mut bytes = vec![0xff; 2 * GUARD + places * width];
        let Matrices { batch, rows, columns, .. } = self.matrices;
        for (i, &value) in self.values.iter().enumerate() {
            let (matrix, row, column) = (i / columns / rows, i / columns % rows, i % columns);
            let at = GUARD + width * (matrix * strides[0] + row * strides[1] + column * strides[2]);
            match self.number {
                Number::Bf16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                Number::Float => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
            }
        }
        let whole = client.create_from_slice(&bytes);
        UploadedMatrices { whole, strides, shape: [batch, rows, columns], number: self.number }
    }
}

/// Numbers on the GPU.
pub struct UploadedMatrices {
    whole: Handle,
    strides: [usize; 3],
    shape: [usize; 3],
    number: Number,
}

impl UploadedMatrices {
    pub fn binding(&self) -> TensorBinding<CudaRuntime> {
        let handle = self.whole.clone().offset_start(GUARD as u64).offset_end(GUARD as u64);
        let (strides, shape) = (self.strides.as_slice().into(), self.shape.as_slice().into());
        TensorBinding { handle: handle.binding(), strides, shape, runtime: PhantomData }
    }

    /// As a library is given it.
    pub fn matrix(&self) -> Matrix {
        let memory = self.whole.clone().offset_start(GUARD as u64).offset_end(GUARD as u64).binding();
        let dtype = if self.number == Number::Bf16 { DType::BF16 } else { DType::F32 };
        Matrix { memory, dtype, shape: self.shape.to_vec(), strides: self.strides.to_vec() }
    }

    /// What lies there now, guards included.
    pub fn read(&self, client: &ComputeClient<CudaRuntime>) -> Result<Vec<f32>, String> {
        let bytes = client.read_one(self.whole.clone()).map_err(|why| format!("{why:?}"))?;
        let value = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
            _ => unreachable!("a number has two bytes or four"),
        };
        Ok(bytes.chunks_exact(self.number.bytes()).map(value).collect())
    }
}

/// In float64.
pub fn product(x: &PlacedMatrices, w: &PlacedMatrices) -> Vec<f64> {
    let (inner, columns) = (x.matrices.columns, w.matrices.columns);
    let mut out = Vec::new();
    for batch in 0..x.matrices.batch.max(w.matrices.batch) {
        for row in 0..x.matrices.rows {
            let mut sums = vec![0.0; columns];
            for k in 0..inner {
                let factor = x.value(batch, row, k);
                sums.iter_mut().enumerate().for_each(|(n, sum)| *sum += factor * w.value(batch, k, n));
            }
            out.extend(sums);
        }
    }
    out
}

/// Whether the product is within rounding, and nothing was written around it. Sums of `inner` terms are of
/// the size of its root.
pub fn is_right(found: &[f32], expected: &[f64], inner: usize, tolerance: f64) -> Result<(), String> {
    let guard = (found.len() - expected.len()) / 2;
    let around = found[..guard].iter().chain(&found[guard + expected.len()..]);
    if around.clone().any(|value| !value.is_nan()) {
        return Err("written outside".into());
    }
    let found = &found[guard..guard + expected.len()];
    let missing = found.iter().filter(|value| value.is_nan()).count();
    if missing > 0 {
        return Err(format!("{missing} of {} are NaN", found.len()));
    }
    let error = found.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
    let relative = error / (inner as f64).sqrt();
    if relative <= tolerance { Ok(()) } else { Err(format!("off by {relative:.2e}")) }
}
