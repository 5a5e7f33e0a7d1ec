//! Products as cuBLASLt describes them.
//!
//! The library's matrices lie by columns. Rows that lie whole are the columns of the transposed matrix, so
//! `out = x w` is asked for as `out' = w' x'`: `A` is `w`, `B` is `x`, and `D` is the result, none of them
//! moved. A side whose columns lie whole instead is the same memory with the other operation:
//!
//! ```text
//! D [o, n] = op(A) op(B)      memory                     op
//! A, of w [k, o]              rows whole:    [o, k]      as it is
//!                             columns whole: [k, o]      transposed
//! B, of x [n, k]              rows whole:    [k, n]      as it is
//!                             columns whole: [n, k]      transposed
//! ```
//!
//! Several matrices are multiplied at once if they lie evenly, or if one side has one for all.

use burn::tensor::DType;
use coxswain_nn::kernels::matrix_library::{Matrix, MatrixProduct};

/// Bytes beyond which no algorithm asks for more alignment.
const WIDEST: usize = 256;

/// Number types in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    F32,
    F16,
    Bf16,
}

impl Number {
    fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// As `cudaDataType` has it (library_types.h).
    pub fn code(self) -> i32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Matrices as they lie in memory, by columns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    pub number: Number,
    /// Rows and columns.
    pub sizes: [usize; 2],
    /// Elements from one column to the next.
    pub apart: usize,
    /// Matrices, and elements from one to the next.
    pub count: usize,
    pub offset: usize,
    /// Whether the product is of the transposed matrix.
    pub transposed: bool,
    /// A power of two that the addresses of all matrices are multiples of.
    pub aligned: u32,
}

impl Side {
    /// The first byte behind the last element.
    pub fn reach(&self) -> usize {
        let last = (self.count - 1) * self.offset + (self.sizes[1] - 1) * self.apart + self.sizes[0];
        last * self.number.bytes()
    }
}

/// A product of one shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub a: Side,
    pub b: Side,
    pub d: Side,
    /// Whether inputs of float32 may be rounded to tf32.
    pub rounds: bool,
    /// Whether each row of `D` has an element of a bias added.
    pub biased: bool,
    /// Whether a matrix that lies as `D` does is added.
    pub summed: bool,
}

impl Shape {
    /// None if the matrices lie in a way, or are of types, that the library is not asked for.
    pub fn of(product: &MatrixProduct) -> Option<Self> {
        let MatrixProduct { x, w, out, may_round, bias, more, .. } = product;
        let count: usize = leading(&out.shape).iter().product();
        let (a, b) = (side(w, count)?, side(x, count)?);
        let d = side(out, count)?;
        let types_agree = a.number == b.number && [Number::F32, a.number].contains(&d.number);
        let empty = [&a, &b, &d].iter().any(|side| side.sizes.contains(&0)) || count == 0;
        // A result is written where it lies, once.
        let plain = !d.transposed && (count == 1 || d.offset >= d.apart * d.sizes[1]);
        // A bias is float32, and so must the result be.
        let float = |added: &Matrix| added.dtype == DType::F32 && d.number == Number::F32;
        let added = bias.iter().all(|bias| float(bias) && bias.shape == [d.sizes[0]])
            && more.iter().all(|more| side(more, count).as_ref() == Some(&d));
        (types_agree && plain && !empty && added).then(|| Self {
            rounds: *may_round && a.number == Number::F32,
            biased: bias.is_some(),
            summed: more.is_some(),
            a,
            b,
            d,
        })
    }
}

fn leading(shape: &[usize]) -> &[usize] {
    &shape[..shape.len().saturating_sub(2)]
}

/// A tensor's matrices as `count` matrices by columns.
fn side(matrix: &Matrix, count: usize) -> Option<Side> {
    let number = Number::of(matrix.dtype)?;
    let rank = matrix.shape.len();
    if rank < 2 || matrix.strides.len() != rank {
        return None;
    }
    let [rows, columns] = [matrix.shape[rank - 2], matrix.shape[rank - 1]];
    let [by_row, by_column] = [matrix.strides[rank - 2], matrix.strides[rank - 1]];
    // Of a single row or column it says nothing how far the next one would be.
    let (sizes, apart, transposed) = if (by_column == 1 || columns == 1) && (by_row >= columns || rows == 1) {
        ([columns, rows], by_row.max(columns), false)
    } else if (by_row == 1 || rows == 1) && (by_column >= rows || columns == 1) {
        ([rows, columns], by_column.max(rows), true)
    } else {
        return None;
    };
    let offset = evenly(leading(&matrix.shape), leading(&matrix.strides), count)?;
    let from = matrix.memory.offset_start.unwrap_or(0) as usize;
    let mut aligned = bytes_of(from);
    for elements in [apart, offset] {
        aligned = aligned.min(bytes_of(elements * number.bytes()));
    }
    Some(Side { number, sizes, apart, count, offset, transposed, aligned: aligned as u32 })
}

/// The largest power of two, up to [`WIDEST`], that divides so many bytes.
fn bytes_of(bytes: usize) -> usize {
    1 << bytes.trailing_zeros().min(WIDEST.trailing_zeros())
}

/// Elements from one matrix to the next, if `count` of them lie evenly: 0 if there is one for all.
fn evenly(shape: &[usize], strides: &[usize], count: usize) -> Option<usize> {
    let axes: Vec<[usize; 2]> = shape
        .iter()
        .zip(strides)
        .map(|(&size, &stride)| [size, stride])
        .filter(|axis| axis[0] != 1)
        .collect();
    let all: usize = axes.iter().map(|axis| axis[0]).product();
    if all == 1 || axes.iter().all(|axis| axis[1] == 0) {
        return (all == 1 || all == count).then_some(0);
    }
    let even = axes.windows(2).all(|pair| pair[0][1] == pair[1][0] * pair[1][1]);
    (even && all == count).then(|| axes[axes.len() - 1][1])
}
