//! AdamW with moments in 8 bits (Dettmers et al., arXiv 2110.02861), as bitsandbytes has it: a quarter of the
//! memory of float32 moments.
//!
//! ```text
//! parameters of 4096 elements or more   blocks of 256 elements that begin at each parameter, the last one
//!                                       short; of each block a code of 8 bits an element and moment
//!                                       (`dynamic_map`: signed for the first, unsigned for the second) and
//!                                       its largest magnitude, float32
//! smaller ones                          float32 moments, as AdamW
//! ```
//!
//! A step widens a block to float32, updates it as AdamW does, and rounds the moments back: the state of an
//! element depends on the others of its block, so a part must have blocks whole. It lies in host memory, and
//! so does the update: on a device weights and gradients would come and go in every step, so that runs on
//! GPUs are refused.

mod dynamic_map;
#[cfg(test)]
mod tests;

use std::ops::Range;

use coxswain_proto::run_spec::Optimizer;
use rayon::prelude::*;

use self::dynamic_map::{SIGNED, UNSIGNED};
use super::{
    adamw::AdamW,
    rule::{ParamUpdate, UpdateRule},
    state::{StateBuffer, StateElement, StateValues},
};
use crate::{
    kernels::flat::{Average, Coefficients, Flat, Part},
    params::{Grain, ParamSpec},
    profile,
};

/// Elements that share a scale.
const BLOCK: usize = 256;
/// Elements of a parameter from which on its moments have 8 bits.
const LEAST: usize = 4096;
/// Elements given to a thread at once.
const CHUNK: usize = 64 * BLOCK;

/// AdamW with moments in 8 bits.
#[derive(Clone, Copy, Debug)]
pub struct AdamW8bit(AdamW);

impl AdamW8bit {
    /// The rule of a run.
    pub fn new(settings: &Optimizer) -> Self {
        Self(AdamW::new(settings))
    }
}

const fn float32(name: &'static str) -> StateBuffer {
    StateBuffer { keeps: |param| param.len() < LEAST, ..StateBuffer::float32(name) }
}

const fn codes(name: &'static str) -> StateBuffer {
    StateBuffer { name, element: StateElement::Uint8, per_value: 1, keeps: is_packed }
}

const fn scales(name: &'static str) -> StateBuffer {
    StateBuffer { name, element: StateElement::Float32, per_value: BLOCK, keeps: is_packed }
}

fn is_packed(param: &ParamSpec) -> bool {
    param.len() >= LEAST
}

impl<F: Flat> UpdateRule<F> for AdamW8bit {
    fn state(&self) -> &[StateBuffer] {
        const {
            &[
                float32("exp_avg"),
                float32("exp_avg_sq"),
                codes("exp_avg_8bit"),
                scales("exp_avg_absmax"),
                codes("exp_avg_sq_8bit"),
                scales("exp_avg_sq_absmax"),
            ]
        }
    }

    fn grain(&self) -> Grain {
        Grain::Block(BLOCK)
    }

    fn update(
        &self,
        part: Part<'_, F, &mut [StateValues<F>]>,
        updates: &[ParamUpdate<'_>],
        average: Option<Average<'_, F>>,
    ) {
        let _op = profile::operation("AdamW, 8 bits");
        let Part { weights, weights_from, grads, grads_from, state } = part;
        let [
            StateValues::Float32(m),
            StateValues::Float32(v),
            StateValues::Uint8(m_codes),
            StateValues::Float32(m_scales),
            StateValues::Uint8(v_codes),
            StateValues::Float32(v_scales),
        ] = state
        else {
            unreachable!("a part has the state that its rule asks for");
        };
        let len = updates.last().map_or(0, |update| update.piece.range.end);
        let grads = grads.read(grads_from..grads_from + len);
        let buffers = [&mut *weights, m, v, m_scales, v_scales];
        F::edit_all(buffers, |[weights, m, v, m_scales, v_scales]| {
            let mut rest = Buffers {
                weights: Cursor::new(&mut weights[weights_from..]),
                floats: [m, v].map(Cursor::new),
                codes: [m_codes, v_codes].map(|codes| Cursor::new(codes)),
                scales: [m_scales, v_scales].map(Cursor::new),
            };
            let mut chunks = Vec::new();
            for update in updates {
                let coefficients = self.0.coefficients(&update.with);
                rest.add_update(update, &grads[update.piece.range.clone()], coefficients, &mut chunks);
            }
            chunks.into_par_iter().for_each(Chunk::update);
        });
        if let Some(Average { values, share }) = average {
            values.approach(weights, weights_from, share);
        }
    }
}

/// What of a buffer lies behind the parts of it that were taken.
struct Cursor<'a, T> {
    rest: &'a mut [T],
    at: usize,
}

impl<'a, T> Cursor<'a, T> {
    fn new(values: &'a mut [T]) -> Self {
        Self { rest: values, at: 0 }
    }

    /// Takes a part, with what is before it.
    fn take(&mut self, range: &Range<usize>) -> &'a mut [T] {
        let taken = self.rest.split_off_mut(..range.end - self.at).expect("runs lie within the part");
        let part = &mut taken[range.start - self.at..];
        self.at = range.end;
        part
    }
}

/// What of all buffers lies behind the updates that were taken.
struct Buffers<'a> {
    weights: Cursor<'a, f32>,
    floats: [Cursor<'a, f32>; 2],
    codes: [Cursor<'a, u8>; 2],
    scales: [Cursor<'a, f32>; 2],
}

impl<'a> Buffers<'a> {
    /// Cuts an update into chunks.
    fn add_update(
        &mut self,
        update: &ParamUpdate<'_>,
        grads: &'a [f32],
        coefficients: Coefficients,
        chunks: &mut Vec<Chunk<'a>>,
    ) {
        let weights = self.weights.take(&update.piece.range);
        let [m, v, m_codes, m_scales, v_codes, v_scales] = &update.piece.state[..] else {
            unreachable!("a piece has a range for each buffer");
        };
        if !is_packed(update.param) {
            let [all_m, all_v] = &mut self.floats;
            let state = Moments::Floats([all_m.take(m), all_v.take(v)]);
            chunks.push(Chunk { weights, grads, state, coefficients });
            return;
        }
        let ([of_m, of_v], [scales_of_m, scales_of_v]) = (&mut self.codes, &mut self.scales);
        let m =
            of_m.take(m_codes).chunks_mut(CHUNK).zip(scales_of_m.take(m_scales).chunks_mut(CHUNK / BLOCK));
        let v =
            of_v.take(v_codes).chunks_mut(CHUNK).zip(scales_of_v.take(v_scales).chunks_mut(CHUNK / BLOCK));
        let moments =
            m.zip(v).map(|(m, v)| Moments::Blocks([m, v].map(|(codes, scales)| Blocks { codes, scales })));
        let elements = weights.chunks_mut(CHUNK).zip(grads.chunks(CHUNK));
        chunks.extend(elements.zip(moments).map(|((weights, grads), state)| Chunk {
            weights,
            grads,
            state,
            coefficients,
        }));
    }
}

/// Some elements of one parameter.
struct Chunk<'a> {
    weights: &'a mut [f32],
    grads: &'a [f32],
    state: Moments<'a>,
    coefficients: Coefficients,
}

/// Both moments of them.
enum Moments<'a> {
    Floats([&'a mut [f32]; 2]),
    Blocks([Blocks<'a>; 2]),
}

struct Blocks<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl<'a> Blocks<'a> {
    /// Codes and scale of each block.
    fn each(self) -> impl Iterator<Item = (&'a mut [u8], &'a mut f32)> {
        self.codes.chunks_mut(BLOCK).zip(self.scales)
    }
}

impl Chunk<'_> {
    fn update(self) {
        let Self { weights, grads, state, coefficients } = self;
        let [m, v] = match state {
            Moments::Floats(moments) => return coefficients.update(weights, grads, moments),
            Moments::Blocks(moments) => moments,
        };
        let elements = weights.chunks_mut(BLOCK).zip(grads.chunks(BLOCK));
        for ((weights, grads), (m, v)) in elements.zip(m.each().zip(v.each())) {
            let ([mut wide_m, mut wide_v], len) = ([[0.0; BLOCK]; 2], weights.len());
            let (wide_m, wide_v) = (&mut wide_m[..len], &mut wide_v[..len]);
            SIGNED.dequantize(m.0, *m.1, wide_m);
            UNSIGNED.dequantize(v.0, *v.1, wide_v);
            coefficients.update(weights, grads, [&mut *wide_m, &mut *wide_v]);
            *m.1 = SIGNED.quantize(wide_m, m.0);
            *v.1 = UNSIGNED.quantize(wide_v, v.0);
        }
    }
}
