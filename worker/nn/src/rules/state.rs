//! What a rule keeps of each parameter besides its weights: named buffers, cut as the weights are.
//!
//! A buffer has a value for each element of a parameter, or one for several: a scale for each block. It may
//! pass over some parameters. The values of a part lie in the order of the flat parameter buffer without
//! gaps, and are saved by the parameter's name and the value's number in it.

use std::ops::Range;

use crate::{
    kernels::flat::Flat,
    params::{ParamSpec, TrainableLayout},
};

/// One buffer of a rule's state.
#[derive(Clone, Copy, Debug)]
pub struct StateBuffer {
    /// Name in checkpoints: letters, digits, `_`. `ema` is taken: the average of the weights.
    pub name: &'static str,
    /// What a value is.
    pub element: StateElement,
    /// Consecutive elements of a parameter that share a value; a parameter's last value may stand for fewer.
    /// A rule's parts are cut at multiples of it.
    pub per_value: usize,
    /// Which parameters it has values of.
    pub keeps: fn(&ParamSpec) -> bool,
}

impl StateBuffer {
    /// A float32 value for each element of every parameter.
    pub const fn float32(name: &'static str) -> Self {
        Self { name, element: StateElement::Float32, per_value: 1, keeps: |_| true }
    }

    /// Numbers of the values that these elements of a parameter have.
    pub fn values(&self, param: &ParamSpec, elements: &Range<usize>) -> Range<usize> {
        match (self.keeps)(param) && !elements.is_empty() {
            true => elements.start / self.per_value..elements.end.div_ceil(self.per_value),
            false => 0..0,
        }
    }
}

/// Element types of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateElement {
    /// 4 bytes.
    Float32,
    /// 1 byte.
    Uint8,
}

impl StateElement {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Uint8 => 1,
        }
    }
}

/// What of one parameter is in a part of the flat parameter buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamPiece {
    /// The parameter's number in the layout.
    pub param: usize,
    /// Elements, counted from its first.
    pub elements: Range<usize>,
    /// Where these are in the part.
    pub range: Range<usize>,
    /// Where their values are in each buffer of state; empty in one that passes over the parameter.
    pub state: Vec<Range<usize>>,
}

/// What of each parameter is in a part, in order.
pub fn pieces(buffers: &[StateBuffer], layout: &TrainableLayout, part: &Range<usize>) -> Vec<ParamPiece> {
    let mut next = vec![0; buffers.len()];
    let in_part = layout.params().iter().enumerate().filter_map(|(number, param)| {
        let (start, end) = (param.offset.max(part.start), param.range().end.min(part.end));
        (start < end).then_some((number, param, start..end))
    });
    let piece = |(number, param, at): (usize, &ParamSpec, Range<usize>)| {
        let elements = at.start - param.offset..at.end - param.offset;
        let place = |(buffer, next): (&StateBuffer, &mut usize)| {
            let begin = *next;
            *next += buffer.values(param, &elements).len();
            begin..*next
        };
        let state = buffers.iter().zip(&mut next).map(place).collect();
        ParamPiece { param: number, range: at.start - part.start..at.end - part.start, state, elements }
    };
    in_part.map(piece).collect()
}

/// Values that each buffer has of a part.
pub fn counts(buffers: &[StateBuffer], layout: &TrainableLayout, part: &Range<usize>) -> Vec<usize> {
    let pieces = pieces(buffers, layout, part);
    (0..buffers.len()).map(|number| pieces.iter().map(|piece| piece.state[number].len()).sum()).collect()
}

/// Bytes of a rule's state of a part.
pub fn bytes(buffers: &[StateBuffer], layout: &TrainableLayout, part: &Range<usize>) -> u64 {
    let counts = counts(buffers, layout, part);
    buffers.iter().zip(counts).map(|(buffer, count)| (buffer.element.bytes() * count) as u64).sum()
}

/// The values of a buffer of state of one part.
#[derive(Clone, Debug, PartialEq)]
pub enum StateValues<F> {
    /// 4 bytes each, where the weights are or in host memory.
    Float32(F),
    /// 1 byte each, in host memory.
    Uint8(Vec<u8>),
}

impl<F: Flat> StateValues<F> {
    /// Zeros; `floats` makes a buffer of float32.
    pub fn zeros(element: StateElement, len: usize, floats: impl FnOnce(usize) -> F) -> Self {
        match element {
            StateElement::Float32 => Self::Float32(floats(len)),
            StateElement::Uint8 => Self::Uint8(vec![0; len]),
        }
    }

    /// Values.
    pub fn len(&self) -> usize {
        match self {
            Self::Float32(values) => values.len(),
            Self::Uint8(values) => values.len(),
        }
    }

    /// True without values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a value is.
    pub fn element(&self) -> StateElement {
        match self {
            Self::Float32(_) => StateElement::Float32,
            Self::Uint8(_) => StateElement::Uint8,
        }
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.len() * self.element().bytes()
    }

    /// Copies as many values as `to` has, from those of `values` that begin at `from`; both are of one
    /// buffer.
    pub fn copy_from(&mut self, to: Range<usize>, values: &StateValues<Vec<f32>>, from: usize) {
        let from = from..from + to.len();
        match (self, values) {
            (Self::Float32(here), StateValues::Float32(there)) => {
                here.edit(|here| here[to].copy_from_slice(&there[from]));
            }
            (Self::Uint8(here), StateValues::Uint8(there)) => here[to].copy_from_slice(&there[from]),
            _ => unreachable!("a buffer of state has one element type on all ranks"),
        }
    }

    /// A copy in host memory.
    pub fn to_host(&self) -> StateValues<Vec<f32>> {
        match self {
            Self::Float32(values) => StateValues::Float32(values.read(0..values.len()).into_owned()),
            Self::Uint8(values) => StateValues::Uint8(values.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::params::{Grain, Group, Init};

    /// Buffers with a scale for every four elements of a parameter of eight and more; a float for each
    /// element of others.
    const BUFFERS: [StateBuffer; 3] = [
        StateBuffer::float32("all"),
        StateBuffer { name: "few", element: StateElement::Float32, per_value: 1, keeps: |p| p.len() < 8 },
        StateBuffer { name: "scale", element: StateElement::Uint8, per_value: 4, keeps: |p| p.len() >= 8 },
    ];

    proptest! {
        #[test]
        fn the_values_of_all_parts_are_those_of_the_whole_each_once(
            lens in prop::collection::vec(0usize..30, 1..8), world in 1usize..6,
        ) {
            let mut layout = TrainableLayout::default();
            for (number, len) in lens.iter().enumerate() {
                layout.add(format!("p{number}"), &[*len], Group::LORA, true, Init::Zeros);
            }
            let cuts = Grain::Block(4).cuts(&layout, world);
            let mut next = vec![[0usize; 3]; lens.len()];
            let mut total = 0;
            for rank in 0..world {
                let part = cuts.part(rank);
                let pieces = pieces(&BUFFERS, &layout, &part);
                total += bytes(&BUFFERS, &layout, &part);
                let mut at = [0usize; 3];
                for piece in &pieces {
                    let param = &layout.params()[piece.param];
                    prop_assert_eq!(piece.range.start + part.start, param.offset + piece.elements.start);
                    for (number, buffer) in BUFFERS.iter().enumerate() {
                        let values = buffer.values(param, &piece.elements);
                        prop_assert_eq!(piece.state[number].clone(), at[number]..at[number] + values.len());
                        at[number] += values.len();
                        if !values.is_empty() {
                            prop_assert_eq!(values.start, next[piece.param][number], "none twice, none left out");
                            next[piece.param][number] = values.end;
                        }
                    }
                }
            }
            for (len, [all, few, scales]) in lens.iter().zip(next) {
                let due = if *len < 8 { [*len, *len, 0] } else { [*len, 0, len.div_ceil(4)] };
                prop_assert_eq!([all, few, scales], due);
            }
            prop_assert_eq!(total, bytes(&BUFFERS, &layout, &(0..layout.len())));
        }
    }
}
