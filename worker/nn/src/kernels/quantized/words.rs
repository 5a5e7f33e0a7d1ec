//! Few bits as 32-bit words, which kernels read.
//!
//! ```text
//! nf4     codes, eight a word │ scales, four a word │ ranges │ mean │ the dynamic type │ what codes say
//! int8    codes, four a word │ the largest magnitude of each row
//! ```
//!
//! Bytes lie in words in their order, the first in the lowest bits; numbers are there by their bits. The two
//! tables that NF4 ends with are alike everywhere: a kibibyte a matrix, so that a kernel reads one buffer.

use super::{
    dynamic,
    int8::Int8Codes,
    nf4::{self, BLOCK, GROUP, Nf4Codes},
};
use crate::dtypes::Packing;

/// Where the parts of an NF4 matrix begin, in words; its codes are the first.
pub(in crate::kernels) struct Nf4Places {
    pub scales: usize,
    pub ranges: usize,
    pub mean: usize,
    pub dynamic: usize,
    pub values: usize,
    end: usize,
}

impl Nf4Places {
    /// Places in the words of so many weights.
    pub fn for_len(len: usize) -> Self {
        let (scales, blocks) = (len.div_ceil(8), len.div_ceil(BLOCK));
        let ranges = scales + blocks.div_ceil(4);
        let mean = ranges + blocks.div_ceil(GROUP);
        let dynamic = mean + 1;
        let values = dynamic + dynamic::VALUES.len();
        Self { scales, ranges, mean, dynamic, values, end: values + nf4::VALUES.len() }
    }
}

/// Where the largest magnitudes of an int8 matrix begin, in words; its codes are the first.
pub(in crate::kernels) fn int8_magnitudes([outputs, inputs]: [usize; 2]) -> usize {
    (outputs * inputs).div_ceil(4)
}

/// Words of a matrix.
pub(super) fn count(packing: Packing, shape: [usize; 2]) -> usize {
    match packing {
        Packing::Nf4 => Nf4Places::for_len(shape[0] * shape[1]).end,
        Packing::Int8 => int8_magnitudes(shape) + shape[0],
    }
}

/// The words of NF4.
pub(super) fn of_nf4(codes: &Nf4Codes) -> Vec<u32> {
    let (codes, scales, ranges, mean) = codes.parts();
    let places = Nf4Places::for_len(2 * codes.len());
    let mut words = Vec::with_capacity(places.end);
    [codes, scales].into_iter().for_each(|bytes| put_bytes(&mut words, bytes));
    for (place, numbers) in [
        (places.ranges, ranges),
        (places.mean, &[mean]),
        (places.dynamic, &dynamic::VALUES[..]),
        (places.values, &nf4::VALUES),
    ] {
        debug_assert_eq!(words.len(), place, "a part is not where it is looked for");
        words.extend(numbers.iter().map(|number| number.to_bits()));
    }
    words
}

/// The words of int8.
pub(super) fn of_int8(codes: &Int8Codes) -> Vec<u32> {
    let (codes, absmax) = codes.parts();
    let mut words = Vec::with_capacity(codes.len().div_ceil(4) + absmax.len());
    put_bytes(&mut words, bytemuck::cast_slice(codes));
    words.extend(absmax.iter().map(|number| number.to_bits()));
    words
}

/// So many weights out of their words.
pub(super) fn nf4(words: &[u32], len: usize) -> Nf4Codes {
    let places = Nf4Places::for_len(len);
    let codes = bytes(&words[..places.scales], len.div_ceil(2));
    let scales = bytes(&words[places.scales..places.ranges], len.div_ceil(BLOCK));
    let ranges = numbers(&words[places.ranges..places.mean]);
    Nf4Codes::of_parts(codes, scales, ranges, f32::from_bits(words[places.mean]))
}

/// A matrix out of its words.
pub(super) fn int8(words: &[u32], shape: [usize; 2]) -> Int8Codes {
    let (codes, absmax) = words.split_at(int8_magnitudes(shape));
    let codes = bytemuck::cast_vec::<u8, i8>(bytes(codes, shape[0] * shape[1]));
    Int8Codes::of_parts(codes, numbers(absmax))
}

/// What of the last word is left is zero.
fn put_bytes(words: &mut Vec<u32>, bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<4>();
    words.extend(whole.iter().map(|bytes| u32::from_le_bytes(*bytes)));
    if !rest.is_empty() {
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        words.push(u32::from_le_bytes(last));
    }
}

fn bytes(words: &[u32], len: usize) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take(len).collect()
}

fn numbers(words: &[u32]) -> Vec<f32> {
    words.iter().map(|word| f32::from_bits(*word)).collect()
}
