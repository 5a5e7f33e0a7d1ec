//! A rule of whole matrices, as Muon is one: momentum, made orthogonal by Newton-Schulz iterations.
//!
//! ```text
//! m = mu m + g                       one float32 value an element: the only state
//! o = m / |m|, five times a o + b (o o^T) o + c (o o^T)^2 o; of a vector o = m
//! w = w (1 - lr decay) - lr o
//! ```

use coxswain_nn::{
    kernels::flat::{Average, Flat, Part},
    params::Grain,
    rules::{ParamUpdate, StateBuffer, StateValues, UpdateRule},
};

/// Momentum that is made orthogonal.
#[derive(Clone, Copy, Debug)]
pub struct Orthogonal {
    /// How much of the momentum is left after a step.
    pub momentum: f32,
}

impl UpdateRule<Vec<f32>> for Orthogonal {
    fn state(&self) -> &[StateBuffer] {
        const { &[StateBuffer::float32("momentum")] }
    }

    /// The iterations look at a matrix whole.
    fn grain(&self) -> Grain {
        Grain::Parameter
    }

    fn update(
        &self,
        part: Part<'_, Vec<f32>, &mut [StateValues<Vec<f32>>]>,
        updates: &[ParamUpdate<'_>],
        average: Option<Average<'_, Vec<f32>>>,
    ) {
        let Part { weights, weights_from, grads, grads_from, state } = part;
        let [StateValues::Float32(momentum)] = state else {
            unreachable!("a part has the state that its rule asks for");
        };
        for ParamUpdate { param, piece, with } in updates {
            assert_eq!(piece.elements, 0..param.len(), "{}: a part has a parameter whole", param.name);
            let at = |from: usize| from + piece.range.start..from + piece.range.end;
            let momentum = &mut momentum[piece.state[0].clone()];
            for (m, g) in momentum.iter_mut().zip(&grads[at(grads_from)]) {
                *m = self.momentum * *m + with.gradient_factor as f32 * g;
            }
            let step = match param.shape[..] {
                [rows, columns] => orthogonal(momentum, rows, columns),
                _ => momentum.to_vec(),
            };
            let (lr, keep) = (with.lr as f32, (1.0 - with.lr * with.weight_decay) as f32);
            let weights = weights[at(weights_from)].iter_mut();
            weights.zip(step).for_each(|(w, o)| *w = *w * keep - lr * o);
        }
        if let Some(Average { values, share }) = average {
            values.approach(weights, weights_from, share);
        }
    }
}

/// The matrix with the same singular vectors whose singular values are all about 1.
fn orthogonal(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let norm = matrix.iter().map(|x| x * x).sum::<f32>().sqrt() + 1e-7;
    let mut o: Vec<f32> = matrix.iter().map(|x| x / norm).collect();
    for _ in 0..5 {
        let gram: Vec<f32> = (0..rows * rows)
            .map(|at| {
                let row = |number: usize| &o[number * columns..(number + 1) * columns];
                row(at / rows).iter().zip(row(at % rows)).map(|(a, b)| a * b).sum()
            })
            .collect();
        let once = product(&gram, &o, rows, columns);
        let twice = product(&gram, &once, rows, columns);
        let terms = o.iter_mut().zip(once.into_iter().zip(twice));
        terms.for_each(|(o, (once, twice))| *o = 3.4445 * *o - 4.775 * once + 2.0315 * twice);
    }
    o
}

/// A square matrix times another one.
fn product(square: &[f32], other: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let at = |row: usize, column: usize| -> f32 {
        (0..rows).map(|inner| square[row * rows + inner] * other[inner * columns + column]).sum()
    };
    (0..rows * columns).map(|place| at(place / columns, place % columns)).collect()
}
