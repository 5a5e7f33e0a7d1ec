//! The device check: a short computation whose result is known, whatever the device is.
//!
//! Matrices hold small whole numbers, so every product and every sum is exact in float32, in any order of
//! additions, with or without fused operations; integer arithmetic on the host says what is right. The
//! operations are those that training spends its time in: a linear layer, its gradients, and a product of two
//! results. Then a layer of numbers that are rounded runs twice, which must give the same bits.
//!
//! What this does not do: find what is wrong only under load, or only in memory that it does not touch.

use burn::tensor::{DType, Tensor, TensorData};
use coxswain_nn::kernels::{LinearOps, Tape};

use super::fault::{Check, InjectedFault};

/// Rows, inputs and outputs of the layer: more than any tile of a kernel, and no multiple of one.
const ROWS: usize = 67;
const INPUTS: usize = 193;
const OUTPUTS: usize = 131;

/// What the device has got wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongResult {
    /// An element is another number than it must be.
    #[error("device check: element {at} of the {what} is {found} instead of {exact}")]
    Element {
        /// Which result.
        what: &'static str,
        /// Which element.
        at: usize,
        /// What the device says.
        found: String,
        /// What is right.
        exact: i64,
    },
    /// A layer gave different bits the second time.
    #[error("device check: the same layer, computed twice, gave two different results")]
    Unrepeatable,
    /// A test has asked for it.
    #[error("{0}")]
    Injected(String),
    /// The device refused.
    #[error("the device check failed: {0}")]
    Refused(String),
}

/// A matrix of whole numbers, row by row.
struct IntegerMatrix {
    rows: usize,
    columns: usize,
    values: Vec<i64>,
}

impl IntegerMatrix {
    /// Numbers from -7 to 7, another pattern for each `seed`.
    fn pattern(rows: usize, columns: usize, seed: usize) -> Self {
        let value = |at: usize| ((at * (2 * seed + 3) + at / 11) % 15) as i64 - 7;
        Self { rows, columns, values: (0..rows * columns).map(value).collect() }
    }

    fn transposed(&self) -> Self {
        let values = (0..self.columns)
            .flat_map(|column| (0..self.rows).map(move |row| self.values[row * self.columns + column]))
            .collect();
        Self { rows: self.columns, columns: self.rows, values }
    }

    /// `self other`, in integers.
    fn times(&self, other: &Self) -> Self {
        let mut values = vec![0; self.rows * other.columns];
        for (row, sums) in values.chunks_exact_mut(other.columns).enumerate() {
            for (inner, factor) in self.values[row * self.columns..][..self.columns].iter().enumerate() {
                let line = &other.values[inner * other.columns..][..other.columns];
                sums.iter_mut().zip(line).for_each(|(sum, value)| *sum += factor * value);
            }
        }
        Self { rows: self.rows, columns: other.columns, values }
    }

    fn on<B: Tape<Base = B>>(&self, device: &B::Device) -> Tensor<B, 2> {
        self.scaled_on(device, 1.0)
    }

    fn scaled_on<B: Tape<Base = B>>(&self, device: &B::Device, by: f32) -> Tensor<B, 2> {
        let values: Vec<f32> = self.values.iter().map(|value| *value as f32 * by).collect();
        Tensor::from_data(TensorData::new(values, [self.rows, self.columns]), device)
    }

    /// Whether the device has come to this.
    fn expect<B: Tape<Base = B>>(&self, what: &'static str, found: Tensor<B, 2>) -> Result<(), WrongResult> {
        let found = values(found)?;
        // Whole numbers this small are exact in f32.
        let wrong = self.values.iter().zip(&found).position(|(exact, found)| *found != *exact as f32);
        match wrong {
            None if found.len() == self.values.len() => Ok(()),
            None => Err(WrongResult::Refused(format!("got {} values for the {what}", found.len()))),
            Some(at) => {
                let (found, exact) = (found[at].to_string(), self.values[at]);
                Err(WrongResult::Element { what, at, found, exact })
            }
        }
    }
}

/// Says that the device computes nothing, but counts what it is asked for: `skip`. Only what stands in for a
/// GPU there sets it (`worker/cuda/software-gpu/run --count`).
const VARIABLE: &str = "COX_KNOWN";

/// Runs it, in some milliseconds.
pub fn compute<B: Tape<Base = B>>(device: &B::Device) -> Result<(), WrongResult> {
    if std::env::var(VARIABLE).is_ok_and(|value| value == "skip") {
        tracing::warn!("{VARIABLE}=skip: the device's arithmetic is not checked");
        return Ok(());
    }
    if let Some(fault) = InjectedFault::for_check(Check::Known) {
        return Err(WrongResult::Injected(fault));
    }
    let x = IntegerMatrix::pattern(ROWS, INPUTS, 1);
    let w = IntegerMatrix::pattern(OUTPUTS, INPUTS, 2);
    let dy = IntegerMatrix::pattern(ROWS, OUTPUTS, 3);
    let (x_ni, w_oi, dy_no) = (x.on::<B>(device), w.on::<B>(device), dy.on::<B>(device));
    let y_no = <B as LinearOps>::linear(x_ni.clone(), w_oi.clone(), None);
    x.times(&w.transposed()).expect("layer's output", y_no)?;
    dy.times(&w).expect("gradient of the input", B::linear_input_gradient(dy_no.clone(), w_oi))?;
    let dw_oi = B::linear_weight_gradient(dy_no, x_ni.clone());
    dy.transposed().times(&x).expect("gradient of the weight", dw_oi)?;
    x.times(&x.transposed()).expect("product", B::product(x_ni.clone(), x_ni.transpose()))?;
    if B::ON_HOST {
        // Products with frozen weights of bfloat16, which has whole numbers up to 256.
        let [x, w, dy] = [(ROWS, INPUTS - 1, 4), (OUTPUTS - 1, INPUTS - 1, 5), (ROWS, OUTPUTS - 1, 6)]
            .map(|(rows, columns, seed)| IntegerMatrix::pattern(rows, columns, seed));
        let w_oi = w.on::<B>(device).cast(DType::BF16);
        let y_no = <B as LinearOps>::linear(x.on::<B>(device), w_oi.clone(), None);
        x.times(&w.transposed()).expect("output of a bfloat16 layer", y_no)?;
        let dx_ni = B::linear_input_gradient(dy.on::<B>(device), w_oi);
        dy.times(&w).expect("gradient of its input", dx_ni)?;
    }
    // Thirds are rounded, in every product and every sum.
    let rounded = || {
        let (x_ni, w_oi) = (x.scaled_on::<B>(device, 1.0 / 3.0), w.scaled_on::<B>(device, 1.0 / 7.0));
        values(<B as LinearOps>::linear(x_ni, w_oi, None))
    };
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    match bits(rounded()?) == bits(rounded()?) {
        true => Ok(()),
        false => Err(WrongResult::Unrepeatable),
    }
}

fn values<B: Tape<Base = B>>(tensor: Tensor<B, 2>) -> Result<Vec<f32>, WrongResult> {
    let data = tensor.into_data().convert::<f32>();
    data.to_vec().map_err(|error| WrongResult::Refused(format!("{error:?}")))
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;

    #[test]
    fn a_sound_device_computes_what_is_known() {
        assert_eq!(compute::<Flex>(&Default::default()), Ok(()));
    }

    #[test]
    fn one_wrong_element_is_found_and_named() {
        let exact = IntegerMatrix::pattern(3, 4, 1);
        let mut wrong = IntegerMatrix::pattern(3, 4, 1);
        wrong.values[7] += 1;
        let found = exact.expect("layer", wrong.on::<Flex>(&Default::default()));
        let Err(WrongResult::Element { what: "layer", at: 7, .. }) = found else { panic!("{found:?}") };
    }

    #[test]
    fn products_of_whole_numbers_are_those_of_arithmetic() {
        let a = IntegerMatrix { rows: 2, columns: 2, values: vec![1, 2, 3, 4] };
        let b = IntegerMatrix { rows: 2, columns: 1, values: vec![5, 6] };
        assert_eq!(a.times(&b).values, [17, 39]);
        assert_eq!(a.transposed().values, [1, 3, 2, 4]);
        // Every sum is exact: the largest is far below 2^24.
        assert!(49 * INPUTS.max(OUTPUTS) < 1 << 24);
    }
}
