//! Rotary positions and tables, computed on the host once per micro-batch.
//!
//! Text tokens have the same position on all three axes (time, height, width). An image occupies one position
//! in time and a grid in height and width, and the text after it continues at its largest coordinate plus one
//! (arXiv 2409.12191, section 2.1). Angles are formed and evaluated in float32, as Transformers does, so that
//! tables agree to the last bits.
//!
//! Not here: videos (refused), and the scaling variants of rotary embeddings (refused by families'
//! configurations).

use burn::tensor::{Tensor, TensorData};

use super::sizes::{TextSizes, TowersSizes};
use crate::pretrained::{error::TokenError, prompts::Rows};
use coxswain_nn::kernels::{ModelBackend, Tape};

/// Position of every token on the three axes, and the images of every row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RopeIndex {
    /// `[3, b, s]` row-major; padding has 0.
    pub position_ids: Vec<u32>,
    /// Images that fall to each row.
    pub images_per_row: Vec<usize>,
    /// Rows of the flattened `[b * s]` sequence that image features replace, in order of images.
    pub image_rows: Vec<u32>,
}

impl RopeIndex {
    /// Positions for token ids `[b, s]`, whose rows lie as given, and the images of all rows in order. Each
    /// row begins at 0.
    ///
    /// Images are assigned to rows by counting image tokens: each run of them takes the next images until it
    /// is used up.
    pub fn new(
        sizes: &TowersSizes,
        ids_bs: &[u32],
        rows: Rows<'_>,
        grids: &[[u32; 3]],
    ) -> Result<Self, TokenError> {
        let mut index = Self {
            position_ids: vec![0; 3 * ids_bs.len()],
            images_per_row: Vec::with_capacity(rows.count()),
            image_rows: Vec::new(),
        };
        let mut images = grids.iter();
        for (row, cells) in rows.cells(ids_bs.len()).into_iter().enumerate() {
            let count = index.add_row(sizes, row, &ids_bs[cells.clone()], cells.start, &mut images)?;
            index.images_per_row.push(count);
        }
        let left = images.len();
        if left > 0 {
            return Err(TokenError::ImageCount { given: grids.len(), used: grids.len() - left });
        }
        Ok(index)
    }

    fn add_row(
        &mut self,
        sizes: &TowersSizes,
        row: usize,
        ids: &[u32],
        first_cell: usize,
        images: &mut std::slice::Iter<'_, [u32; 3]>,
    ) -> Result<usize, TokenError> {
        let (tokens, merge) = (sizes.tokens, sizes.merge as u32);
        if ids.contains(&tokens.video) {
            return Err(TokenError::Video { row, id: tokens.video });
        }
        let wanted = ids.iter().filter(|&&id| id == tokens.image).count();
        let (mut features, mut used) = (0, 0);
        let (mut next, mut i) = (0, 0);
        while i < ids.len() {
            if ids[i] != tokens.image {
                self.set(first_cell + i, [next; 3]);
                (next, i) = (next + 1, i + 1);
                continue;
            }
            let mismatch =
                |features| TokenError::ImageTokens { row, id: tokens.image, tokens: wanted, features };
            let &[t, h, w] = images.next().ok_or_else(|| mismatch(features))?;
            let (h, w) = (h / merge, w / merge);
            let count =
                [t, h, w].into_iter().fold(1, |cells: usize, side| cells.saturating_mul(side as usize));
            (features, used) = (count.saturating_add(features), used + 1);
            if count == 0 || ids[i..].iter().take_while(|&&id| id == tokens.image).count() < count {
                return Err(mismatch(features));
            }
            for offset in 0..count as u32 {
                let at = [offset / (h * w), offset / w % h, offset % w].map(|axis| next + axis);
                self.set(first_cell + i + offset as usize, at);
                self.image_rows.push((first_cell + i) as u32 + offset);
            }
            (next, i) = (next + h.max(w), i + count);
        }
        Ok(used)
    }

    fn set(&mut self, cell: usize, at: [u32; 3]) {
        let plane = self.position_ids.len() / 3;
        for (axis, position) in at.into_iter().enumerate() {
            self.position_ids[axis * plane + cell] = position;
        }
    }
}

/// Cosine and sine of every angle, `[b, s, k]`.
pub struct RotaryTables<B: ModelBackend> {
    /// Cosines.
    pub cos_bsk: Tensor<B, 3>,
    /// Sines.
    pub sin_bsk: Tensor<B, 3>,
}

impl<B: ModelBackend> Clone for RotaryTables<B> {
    fn clone(&self) -> Self {
        Self { cos_bsk: self.cos_bsk.clone(), sin_bsk: self.sin_bsk.clone() }
    }
}

impl<B: ModelBackend> RotaryTables<B> {
    /// Cosines and sines, on a tape.
    pub fn lifted<T: Tape<Base = B>>(&self) -> [Tensor<T, 3>; 2] {
        [&self.cos_bsk, &self.sin_bsk].map(|table_bsk| T::lift(table_bsk.clone()))
    }

    /// Tables of the language model: frequency `j` turns with the axis that the sizes have for it.
    pub fn text(sizes: &TextSizes, position_ids: &[u32], batch: usize, device: &B::Device) -> Self {
        let frequencies = inverse_frequencies(sizes.rope_theta, sizes.head_dim, sizes.head_dim / 2);
        let axes = &sizes.rotary_axes;
        let plane = position_ids.len() / 3;
        let position = |cell: usize, j: usize| position_ids[axes[j] * plane + cell];
        Self::of_positions([batch, plane / batch.max(1)], &frequencies, position, device)
    }

    /// Tables of a vision tower with heads of this width, for patches at these rows and columns: the first
    /// half of the frequencies turns with the row, the second with the column.
    pub fn axial(head_dim: usize, theta: f64, positions: &[[u32; 2]], device: &B::Device) -> Self {
        let (half, quarter) = (head_dim / 2, head_dim / 4);
        let frequencies = inverse_frequencies(theta, half, quarter).repeat(2);
        let position = |cell: usize, j: usize| positions[cell][usize::from(j >= quarter)];
        Self::of_positions([1, positions.len()], &frequencies, position, device)
    }

    /// Frequency `j` of a cell turns with `position_of(cell, j)`, and both halves of a head by the same
    /// angles (rotate-half convention). Cells are many and positions few: each one's sines are computed once.
    fn of_positions(
        [batch, seq]: [usize; 2],
        frequencies: &[f32],
        position_of: impl Fn(usize, usize) -> u32,
        device: &B::Device,
    ) -> Self {
        let half = frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; batch * seq * 2 * half], vec![0.0; batch * seq * 2 * half]);
        // Sine and cosine by frequency, of each position that was met, and by position where its own begin.
        let mut angles: Vec<(f32, f32)> = Vec::new();
        let mut begins: Vec<usize> = Vec::new();
        for cell in 0..batch * seq {
            for j in 0..half {
                let position = position_of(cell, j) as usize;
                if begins.len() <= position {
                    begins.resize(position + 1, NOT_MET);
                }
                if begins[position] == NOT_MET {
                    begins[position] = angles.len();
                    angles
                        .extend(frequencies.iter().map(|frequency| (position as f32 * frequency).sin_cos()));
                }
                let begin = begins[position];
                let (s, c) = angles[begin + j];
                for at in [cell * 2 * half + j, cell * 2 * half + half + j] {
                    (cos[at], sin[at]) = (c, s);
                }
            }
        }
        let shape = [batch, seq, 2 * half];
        let table = |values: Vec<f32>| B::bring(TensorData::new(values, shape), device).reshape(shape);
        Self { cos_bsk: table(cos), sin_bsk: table(sin) }
    }
}

/// Stands for a position whose angles are not known yet.
const NOT_MET: usize = usize::MAX;

/// `theta^(-2 j / dim)` for `j < count`.
fn inverse_frequencies(theta: f64, dim: usize, count: usize) -> Vec<f32> {
    (0..count).map(|j| 1.0 / (theta as f32).powf((2 * j) as f32 / dim as f32)).collect()
}
