//! The input file of `cox model forward`: tensors as Transformers takes them, checked.

use std::{ops::Range, path::Path};

use coxswain_proto::bounded;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::pretrained::error::ModelError;

/// Tensors of one forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardInputs {
    /// `[b, s]`.
    pub input_ids: Vec<u32>,
    /// Padded length.
    pub seq: usize,
    /// Attended tokens of each row.
    pub valid: Vec<Range<u32>>,
    /// `[patches, channels * frames * side * side]`; empty without images.
    pub pixel_values: Vec<f32>,
    /// `(t, h, w)` in patches, one per image.
    pub grids: Vec<[u32; 3]>,
    /// `[b, s]`, -100 where no token is to be predicted.
    pub labels: Option<Vec<i64>>,
    /// `[b, s]`, one word a token, by which adapters drop what they read.
    pub dropout_rows: Option<Vec<u64>>,
}

impl ForwardInputs {
    /// Reads and checks the file. `patch_values` is the width of a row of `pixel_values`.
    pub fn read(path: &Path, patch_values: usize) -> Result<Self, ModelError> {
        let bytes = bounded::read(path, u64::MAX).map_err(|source| ModelError::Io {
            path: path.into(),
            source,
            remedy: "name a safetensors file with input_ids, attention_mask, pixel_values and image_grid_thw",
        })?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| ModelError::Safetensors {
            path: path.into(),
            problem: format!("not a valid safetensors file ({error})"),
        })?;
        Reader { path, tensors }.inputs(patch_values)
    }

    /// Rows.
    pub fn batch(&self) -> usize {
        self.valid.len()
    }
}

/// Values and shape of a tensor.
type ShapedValues<T> = (Vec<T>, Vec<usize>);

struct Reader<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl Reader<'_> {
    fn inputs(&self, patch_values: usize) -> Result<ForwardInputs, ModelError> {
        let (ids, shape) = self
            .integers("input_ids")?
            .ok_or_else(|| self.error("input_ids", "missing; expected i64 [batch, sequence]"))?;
        let [batch, seq] = self.axes("input_ids", &shape)?;
        if batch * seq == 0 {
            return Err(self.error("input_ids", "no tokens"));
        }
        let input_ids = ids
            .iter()
            .map(|&id| u32::try_from(id).ok().filter(|&id| id <= i32::MAX as u32))
            .collect::<Option<_>>()
            .ok_or_else(|| self.error("input_ids", "a token id is negative or above 2147483647"))?;
        let valid = match self.like_ids("attention_mask", batch, seq)? {
            Some(mask) => self.ranges(&mask, seq)?,
            None => vec![0..seq as u32; batch],
        };
        let (grids, pixel_values) = self.images(patch_values)?;
        let labels = self.like_ids("labels", batch, seq)?;
        let words = self.like_ids("dropout_rows", batch, seq)?;
        let dropout_rows = words.map(|words| words.into_iter().map(i64::cast_unsigned).collect());
        Ok(ForwardInputs { input_ids, seq, valid, pixel_values, grids, labels, dropout_rows })
    }

    fn images(&self, patch_values: usize) -> Result<(Vec<[u32; 3]>, Vec<f32>), ModelError> {
        let grids = match self.integers("image_grid_thw")? {
            None => Vec::new(),
            Some((values, shape)) => {
                let [_, three] = self.axes("image_grid_thw", &shape)?;
                if three != 3 {
                    return Err(
                        self.error("image_grid_thw", format!("shape {shape:?}; expected [images, 3]"))
                    );
                }
                values
                    .chunks_exact(3)
                    .map(|grid| {
                        // A side of 2^16 patches is far beyond any image.
                        let side = |at: usize| u32::try_from(grid[at]).ok().filter(|side| *side < 1 << 16);
                        Some([side(0)?, side(1)?, side(2)?])
                    })
                    .collect::<Option<Vec<_>>>()
                    .ok_or_else(|| self.error("image_grid_thw", "a value is negative or above 65535"))?
            }
        };
        let Some((pixels, shape)) = self.floats("pixel_values")? else {
            return match grids.len() {
                0 => Ok((grids, Vec::new())),
                n => Err(self.error("pixel_values", format!("missing; images in image_grid_thw: {n}"))),
            };
        };
        let [_, width] = self.axes("pixel_values", &shape)?;
        if width != patch_values {
            let problem = format!("rows of {width} values; this model's patches have {patch_values}");
            return Err(self.error("pixel_values", problem));
        }
        if let Some(at) = pixels.iter().position(|value| !value.is_finite()) {
            return Err(self.error("pixel_values", format!("{} in patch {}", pixels[at], at / width)));
        }
        Ok((grids, pixels))
    }

    /// Attended tokens must be contiguous: padding on the left, on the right, or on both sides.
    fn ranges(&self, mask: &[i64], seq: usize) -> Result<Vec<Range<u32>>, ModelError> {
        let rows = mask.chunks_exact(seq).enumerate().map(|(row, mask)| {
            let start = mask.iter().position(|&m| m != 0);
            let end = mask.iter().rposition(|&m| m != 0);
            let (Some(start), Some(end)) = (start, end) else {
                return Err(self.error("attention_mask", format!("row {row} attends to nothing")));
            };
            if mask[start..=end].contains(&0) {
                let problem = format!("row {row} has a gap; only padding on the left and right is supported");
                return Err(self.error("attention_mask", problem));
            }
            Ok(start as u32..end as u32 + 1)
        });
        rows.collect()
    }

    fn like_ids(&self, name: &'static str, batch: usize, seq: usize) -> Result<Option<Vec<i64>>, ModelError> {
        let Some((values, shape)) = self.integers(name)? else { return Ok(None) };
        if shape != [batch, seq] {
            let problem = format!("shape {shape:?}; input_ids has [{batch}, {seq}]");
            return Err(self.error(name, problem));
        }
        Ok(Some(values))
    }

    fn integers(&self, name: &'static str) -> Result<Option<ShapedValues<i64>>, ModelError> {
        let Some(view) = self.view(name) else { return Ok(None) };
        let bytes = view.data();
        let values = match view.dtype() {
            Dtype::I64 => elements(bytes, i64::from_le_bytes),
            Dtype::I32 => elements(bytes, |le| i32::from_le_bytes(le).into()),
            Dtype::BOOL | Dtype::U8 => bytes.iter().map(|&byte| byte.into()).collect(),
            found => return Err(self.error(name, format!("stored as {found:?}; expected I64"))),
        };
        Ok(Some((values, view.shape().to_vec())))
    }

    fn floats(&self, name: &'static str) -> Result<Option<ShapedValues<f32>>, ModelError> {
        let Some(view) = self.view(name) else { return Ok(None) };
        let bytes = view.data();
        let values = match view.dtype() {
            Dtype::F32 => elements(bytes, f32::from_le_bytes),
            Dtype::BF16 => elements(bytes, |le| bf16::from_le_bytes(le).to_f32()),
            Dtype::F16 => elements(bytes, |le| f16::from_le_bytes(le).to_f32()),
            found => return Err(self.error(name, format!("stored as {found:?}; expected F32"))),
        };
        Ok(Some((values, view.shape().to_vec())))
    }

    fn view(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.tensor(name).ok()
    }

    fn axes(&self, name: &'static str, shape: &[usize]) -> Result<[usize; 2], ModelError> {
        shape.try_into().map_err(|_| self.error(name, format!("shape {shape:?}; expected two axes")))
    }

    fn error(&self, tensor: &'static str, problem: impl Into<String>) -> ModelError {
        ModelError::Input { path: self.path.into(), tensor, problem: problem.into() }
    }
}

fn elements<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .chunks_exact(N)
        .map(|element| read(element.try_into().expect("chunks_exact yields N bytes")))
        .collect()
}
