//! Dropout on the input of a low-rank update (`lora_dropout` of PEFT): which elements are dropped is a
//! function of a key, computed again wherever it is needed and kept nowhere.
//!
//! ```text
//! sample    (seed, step, sample)             one word, drawn as every other draw is (`rng`)
//! row       sample, position in the sample   one word a row: nothing of the batch around it
//! element   row, module, column              32 bits; dropped if the upper 24 are below the rate
//! ```
//!
//! So a retry, another micro-batch, another padding, another world size and a block that runs again all drop
//! the same elements. The mixing is of 32-bit words, which processors and GPUs do alike: multiplications and
//! shifts (lowbias32 of C. Wellons' hash prospector, with the second word added between its two
//! multiplications).

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use rayon::prelude::*;

use crate::rng::{Key, Purpose};

/// Odd, and nearly 2^32 divided by the golden ratio.
pub(super) const STRIDE: u32 = 0x9e37_79b9;
pub(super) const FIRST: u32 = 0x7feb_352d;
pub(super) const SECOND: u32 = 0x846c_a68b;

/// The rows of an input, as dropout knows them.
#[derive(Clone, Debug)]
pub struct DropoutRows<B: Backend> {
    words: Arc<[u64]>,
    /// The rows' words as pairs of 32-bit words, lower first, where kernels read them.
    on_device: Option<Tensor<B, 1, Int>>,
}

impl<B: Backend> DropoutRows<B> {
    /// From one word a row, as [`row_word`] makes it; for kernels on `device`, if they are not on the host.
    pub fn new(words: Vec<u64>, device: Option<&B::Device>) -> Self {
        let mut rows = Self { words: words.into(), on_device: None };
        rows.on_device = device.map(|device| rows.words_on(device));
        rows
    }

    /// Some of these rows, in this order.
    pub fn select(&self, rows: impl Iterator<Item = usize>) -> Self {
        Self { words: rows.map(|row| self.words[row]).collect(), on_device: None }
    }

    /// These rows on another backend, whose tensors `change` makes.
    pub fn changed<C: Backend>(
        self,
        change: impl FnOnce(Tensor<B, 1, Int>) -> Tensor<C, 1, Int>,
    ) -> DropoutRows<C> {
        DropoutRows { words: self.words, on_device: self.on_device.map(change) }
    }

    /// Pairs of words where kernels read them: as they are there already, or brought there.
    pub fn words_on(&self, device: &B::Device) -> Tensor<B, 1, Int> {
        self.on_device.clone().unwrap_or_else(|| {
            let halves = self.words.iter().flat_map(|&word| [word as u32 as i32, (word >> 32) as u32 as i32]);
            let halves: Vec<i32> = halves.collect();
            let count = halves.len();
            Tensor::from_data(TensorData::new(halves, [count]), (device, DType::I32))
        })
    }
}

/// The word of a sample in a step of a run with this seed.
pub fn sample_word(seed: u64, step: u64, sample: u64) -> u64 {
    Key { seed, purpose: Purpose::Dropout, step, sample, repeat: 0 }.draws().word()
}

/// The word of a row: of what its sample's draws gave, and of its position in the sample.
pub fn row_word(sample: u64, position: u64) -> u64 {
    mixed(sample ^ mixed(position.wrapping_add(0x9e37_79b9_7f4a_7c15)))
}

/// The word of a module, by its path.
pub fn module_word(path: &str) -> u64 {
    // FNV-1a.
    let fold = |word: u64, byte: u8| (word ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    mixed(path.bytes().fold(0xcbf2_9ce4_8422_2325, fold))
}

/// What one low-rank update drops of its input.
#[derive(Clone, Debug)]
pub struct Dropout<B: Backend> {
    /// The input's rows.
    pub rows: DropoutRows<B>,
    /// [`module_word`] of the layer.
    pub module: u64,
    /// Fraction that is dropped, from 0 to below 1.
    pub rate: f64,
}

impl<B: Backend> Dropout<B> {
    /// On another backend.
    pub(super) fn changed<C: Backend>(
        self,
        change: impl FnOnce(Tensor<B, 1, Int>) -> Tensor<C, 1, Int>,
    ) -> Dropout<C> {
        Dropout { rows: self.rows.changed(change), module: self.module, rate: self.rate }
    }

    /// As slices are multiplied with it.
    pub(super) fn mask(&self) -> Mask<'_> {
        Mask {
            rows: &self.rows.words,
            module: self.module,
            threshold: threshold(self.rate),
            scale: scale(self.rate),
        }
    }

    /// An input with the dropped elements zero and all others scaled up, in its own type.
    pub fn apply(&self, x_ni: Tensor<B, 2>) -> Tensor<B, 2> {
        let (shape, dtype, device) = (x_ni.dims(), x_ni.dtype(), x_ni.device());
        let factors_ni: Tensor<B, 2> =
            Tensor::from_data(TensorData::new(self.factors(shape), shape), &device);
        x_ni * factors_ni.cast(dtype)
    }

    /// What each element is multiplied with, row by row on as many threads as there are.
    fn factors(&self, [rows, columns]: [usize; 2]) -> Vec<f32> {
        let (mask, mut factors) = (self.mask(), vec![1.0; rows * columns]);
        let by_row = factors.par_chunks_exact_mut(columns.max(1)).enumerate();
        by_row.for_each(|(row, factors)| mask.row(row).apply(0, factors));
        factors
    }
}

/// Below it the upper 24 bits of an element's word mean that it is dropped.
pub(super) fn threshold(rate: f64) -> u32 {
    (rate * f64::from(1 << 24)).round() as u32
}

/// What is kept is multiplied by this: the expectation stays.
pub(super) fn scale(rate: f64) -> f32 {
    (1.0 / (1.0 - rate)) as f32
}

/// A [`Dropout`] on the host.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a> {
    rows: &'a [u64],
    module: u64,
    threshold: u32,
    scale: f32,
}

impl Mask<'_> {
    /// What is dropped of a row.
    pub fn row(&self, row: usize) -> RowMask {
        let (row, module) = (self.rows[row], self.module);
        let low = hashed(row as u32 ^ module as u32, 0);
        let high = hashed(((row ^ module) >> 32) as u32, low);
        RowMask { low, high, threshold: self.threshold, scale: self.scale }
    }
}

/// What a [`Mask`] drops of a row.
#[derive(Clone, Copy)]
pub(super) struct RowMask {
    low: u32,
    high: u32,
    threshold: u32,
    scale: f32,
}

impl RowMask {
    /// The factor of a column: 0, or what scales up.
    #[inline(always)]
    pub fn factor(self, column: u32) -> f32 {
        let word = hashed(self.low.wrapping_add(column.wrapping_mul(STRIDE)), self.high);
        if word >> 8 < self.threshold { 0.0 } else { self.scale }
    }

    /// Multiplies the elements of a row from column `first` on.
    #[inline(always)]
    pub fn apply(self, first: usize, values: &mut [f32]) {
        for (column, value) in (first as u32..).zip(values) {
            *value *= self.factor(column);
        }
    }
}

/// 32 bits of 64: see the top of this file.
#[inline(always)]
fn hashed(mut word: u32, other: u32) -> u32 {
    word ^= word >> 16;
    word = word.wrapping_mul(FIRST);
    word ^= word >> 15;
    word = word.wrapping_add(other).wrapping_mul(SECOND);
    word ^ (word >> 16)
}

/// The end of splitmix64.
fn mixed(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    fn dropout(rate: f64, rows: usize, module: &str) -> Dropout<Flex> {
        let words = (0..rows).map(|row| row_word(11, row as u64)).collect();
        Dropout { rows: DropoutRows::new(words, None), module: module_word(module), rate }
    }

    fn factors(dropout: &Dropout<Flex>, [rows, columns]: [usize; 2]) -> Vec<f32> {
        let x = Tensor::ones([rows, columns], &Default::default());
        dropout.apply(x).into_data().to_vec().expect("f32")
    }

    #[test]
    fn the_fraction_dropped_is_the_rate_and_the_expectation_stays() {
        for rate in [0.05, 0.3, 0.5] {
            let factors = factors(&dropout(rate, 400, "q"), [400, 500]);
            let dropped = factors.iter().filter(|&&factor| factor == 0.0).count() as f64 / 2e5;
            let mean = factors.iter().map(|&factor| f64::from(factor)).sum::<f64>() / 2e5;
            assert!((dropped - rate).abs() < 4e-3 && (mean - 1.0).abs() < 8e-3, "{rate}: {dropped}, {mean}");
        }
    }

    #[test]
    fn rows_columns_and_modules_are_dropped_independently() {
        let (rows, columns) = (256, 256);
        let one = factors(&dropout(0.5, rows, "q"), [rows, columns]);
        let other = factors(&dropout(0.5, rows, "k"), [rows, columns]);
        let kept = |mask: &[f32], at: usize| i32::from(mask[at] > 0.0) * 2 - 1;
        let agree = |a: &dyn Fn(usize) -> i32, b: &dyn Fn(usize) -> i32, count: usize| {
            f64::from((0..count).map(|at| a(at) * b(at)).sum::<i32>()) / count as f64
        };
        let count = rows * columns - columns;
        let of = |at| kept(&one, at);
        let found = [
            agree(&of, &|at| kept(&other, at), count),
            agree(&of, &|at| kept(&one, at + 1), count),
            agree(&of, &|at| kept(&one, at + columns), count),
        ];
        assert!(found.iter().all(|correlation| correlation.abs() < 0.02), "{found:?}");
    }

    #[test]
    fn words_are_those_of_the_fixture_that_peft_was_given() {
        // As printed by integration-tests/fixtures/make_dropout.py.
        assert_eq!(row_word(1000, 3), 0x83bd_c1c4_2cca_39eb);
        let module = module_word("model.language_model.layers.0.self_attn.q_proj");
        assert_eq!(module, 0x0281_2567_ef4e_26e9);
    }

    #[test]
    fn a_row_is_dropped_by_its_own_word_alone() {
        let whole = dropout(0.3, 10, "q");
        let part = Dropout {
            rows: DropoutRows::<Flex>::new(whole.rows.words[4..7].to_vec(), None),
            ..whole.clone()
        };
        assert_eq!(factors(&whole, [10, 40])[4 * 40..7 * 40], factors(&part, [3, 40]));
    }
}
