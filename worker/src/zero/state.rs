//! The optimizer's state as bytes: one safetensors file per rank, by parameter name and offset.
//!
//! ```text
//! tensors    <buffer>.<parameter>[<first value>..]     what of a buffer of the update rule's state is this
//!                                                      parameter's and in this rank's part
//!            ema.<parameter>[<first element>..]        the average of the weights, if the run keeps one
//! metadata   format, steps, rank, world; skipped, if steps were left out
//! ```
//!
//! Names and offsets, not positions in the flat parameter buffer: all files of a checkpoint together can be
//! read at any world size, and into a layout whose order has changed. Weights are not in here; the checkpoint
//! has them in full, in fp32.
//!
//! Reading checks that every value of this rank's part is there exactly once, before anything is changed.

mod error;
mod saved;

use std::io::{self, Write};

use serde_json::{Map, Value, json};

pub use self::error::StateError;
use self::saved::{FORMAT, OtherKinds, WantedValues, check_coverage, dtype, read_files, read_to, wanted};
use super::{loss_scale::ScaleState, optimizer::ShardedOptimizer, soundness};
use coxswain_nn::{
    kernels::flat::Flat,
    params::TrainableLayout,
    rules::{self, StateBuffer, StateValues},
    tensor_file::ReadAt,
};

/// The average of the weights: the last kind of values, which a run may do without.
pub(super) const AVERAGE: StateBuffer = StateBuffer::float32("ema");
/// Values read at once: what of state in a device's memory is in the host's while it is written.
const PIECE: usize = 16 << 20;

impl<F: Flat> ShardedOptimizer<F> {
    /// This rank's state as a safetensors file.
    pub fn export(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.state_bytes() as usize + (16 << 10));
        self.write_to(&mut bytes).expect("a vector takes everything");
        bytes
    }

    /// Writes what [`ShardedOptimizer::export`] returns, without a copy of the state; returns the bytes
    /// written. Values that nothing can go on from are refused as invalid data.
    pub fn write_to(&self, out: &mut dyn Write) -> io::Result<u64> {
        let header = self.header();
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (buffer, values) in self.rule.rule.state().iter().zip(&self.state) {
            match values {
                StateValues::Float32(values) => write_floats(buffer.name, values, out)?,
                StateValues::Uint8(values) => out.write_all(values)?,
            }
        }
        self.average.iter().try_for_each(|average| write_floats(AVERAGE.name, &average.values, out))?;
        Ok(8 + header.len() as u64 + self.state_bytes())
    }

    /// Kinds of values: the buffers of the rule's state, and the average of the weights.
    fn kinds(&self) -> Vec<StateBuffer> {
        self.rule.rule.state().iter().copied().chain([AVERAGE]).collect()
    }

    /// How many of these kinds this run keeps.
    fn kept(&self) -> usize {
        self.state.len() + usize::from(self.average.is_some())
    }

    /// Takes over the state of a checkpoint, given its ranks' files; they may come from any world size. Empty
    /// ones are passed over: files that have nothing of this rank's part need not be there. What is wanted is
    /// read into its place, and nothing else. On an error nothing has changed, unless a file could not be
    /// read any more. Returns whether everything is there that this run keeps: files of a
    /// run that kept no average of its weights have none, and the average here is as it was.
    pub fn import<S: ReadAt>(&mut self, files: &[S]) -> Result<bool, StateError> {
        let (kinds, kept) = (self.kinds(), self.kept());
        let (reached, files, saved) = read_files(files, &self.layout, &kinds, OtherKinds::Refused)?;
        let averaged = saved.iter().any(|piece| piece.kind == self.state.len());
        let there = if averaged { kept } else { self.state.len() };
        let of_kind = |kind: usize| saved.iter().filter(move |piece| piece.kind == kind);
        let wanted = |kind: usize| wanted(&self.layout, &self.pieces, kind, &kinds[kind]);
        let wanted: Vec<_> = (0..there).map(wanted).collect();
        for (kind, wanted) in wanted.iter().enumerate() {
            check_coverage(kinds[kind].name, wanted, of_kind(kind))?;
        }
        let floats = |kind: usize, values: &mut F| {
            let read = |values: &mut [f32]| {
                read_to(&files, of_kind(kind), &wanted[kind], 4, bytemuck::cast_slice_mut(values))
            };
            values.edit(read)
        };
        for (kind, values) in self.state.iter_mut().enumerate() {
            match values {
                StateValues::Float32(values) => floats(kind, values)?,
                StateValues::Uint8(values) => read_to(&files, of_kind(kind), &wanted[kind], 1, values)?,
            }
        }
        if let Some(average) = self.average.as_mut().filter(|_| averaged) {
            floats(kept - 1, &mut average.values)?;
        }
        (self.steps, self.skipped) = (reached.steps, reached.skipped);
        if let (Some(scaler), Some(state)) = (&mut self.loss_scaler, reached.loss_scale) {
            scaler.restore(state);
        }
        Ok(there == kept)
    }

    /// The average, if one is kept, begins with these weights, full length.
    pub(crate) fn begin_average(&mut self, weights: &[f32]) {
        let part = self.partition.own();
        let begin = |values: &mut [f32]| values.copy_from_slice(&weights[part]);
        if let Some(average) = &mut self.average {
            average.values.edit(begin);
        }
    }

    /// The JSON header of the format, padded so that the data begins at a multiple of eight.
    fn header(&self) -> Vec<u8> {
        let mut header = Map::new();
        let mut metadata = json!({
            "format": FORMAT,
            "steps": self.steps.to_string(),
            "rank": self.partition.rank().to_string(),
            "world": self.partition.world().to_string(),
        });
        if self.skipped > 0 {
            metadata["skipped"] = json!(self.skipped.to_string());
        }
        if let Some(ScaleState { exponent, good }) = self.loss_scaler.map(|scaler| scaler.state()) {
            metadata["loss_scale_exponent"] = json!(exponent.to_string());
            metadata["loss_scale_good_steps"] = json!(good.to_string());
        }
        header.insert("__metadata__".into(), metadata);
        let mut offset = 0;
        for (kind, buffer) in self.kinds().iter().enumerate().take(self.kept()) {
            for WantedValues { param, values, .. } in wanted(&self.layout, &self.pieces, kind, buffer) {
                let end = offset + buffer.element.bytes() * values.len();
                let name = format!("{}.{}[{}..]", buffer.name, param.name, values.start);
                let (dtype, shape) = (dtype(buffer.element), [values.len()]);
                let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]});
                header.insert(name, entry);
                offset = end;
            }
        }
        let mut bytes = Value::Object(header).to_string().into_bytes();
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        bytes
    }
}

fn write_floats<F: Flat>(kind: &str, values: &F, out: &mut dyn Write) -> io::Result<()> {
    for start in (0..values.len()).step_by(PIECE) {
        let piece = values.read(start..(start + PIECE).min(values.len()));
        soundness::check(kind, &piece)?;
        if cfg!(target_endian = "little") {
            out.write_all(bytemuck::cast_slice(&piece))?;
        } else {
            piece.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
        }
    }
    Ok(())
}

/// The average of all weights, from all files of a checkpoint; none if its run kept none.
pub fn read_average<S: ReadAt>(
    files: &[S],
    layout: &TrainableLayout,
) -> Result<Option<Vec<f32>>, StateError> {
    let (_, files, saved) = read_files(files, layout, &[AVERAGE], OtherKinds::PassedOver)?;
    if saved.is_empty() {
        return Ok(None);
    }
    let wanted = wanted(layout, &rules::pieces(&[], layout, &(0..layout.len())), 0, &AVERAGE);
    check_coverage(AVERAGE.name, &wanted, saved.iter())?;
    let mut average = vec![0.0; layout.len()];
    read_to(&files, saved.iter(), &wanted, 4, bytemuck::cast_slice_mut(&mut average))?;
    Ok(Some(average))
}
