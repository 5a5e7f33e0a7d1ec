//! Where the patches of images go: window order, attention segments, rotary positions. Host integers only.
//!
//! ```text
//! raster   rows as preprocessing makes them: merged squares in raster order, merge * merge patches each
//! window   the same squares, those of one attention window next to each other; all blocks run in this order
//! ```
//!
//! A window is `window_tokens` merged squares on a side; windows at the right and bottom edge are smaller.
//! Full-attention blocks see a whole frame, which is contiguous in both orders, because windows never
//! straddle frames. Agrees with Transformers' `get_vision_window_index`, `get_vision_cu_seqlens` and
//! `get_vision_position_ids`.

use std::sync::Arc;

use super::config::VisionConfig;
use crate::{pretrained::error::TokenError, two_towers::grid};
use coxswain_nn::kernels::AttentionMask;

/// Layout of the patches of one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowPlan {
    /// `order[j]` is the raster number of the merged square that comes `j`-th in window order.
    pub order: Vec<u32>,
    /// Boundaries of windows, in patches: `[0, .., patches]`.
    pub windows: Arc<[u32]>,
    /// Boundaries of frames, in patches.
    pub frames: Arc<[u32]>,
    /// `(row, column)` of each patch in its frame, in raster order.
    pub positions: Vec<[u32; 2]>,
}

impl WindowPlan {
    /// Plans the given images, `(t, h, w)` in patches each.
    pub fn new(config: &VisionConfig, grids: &[[u32; 3]]) -> Result<Self, TokenError> {
        let merge = config.spatial_merge_size;
        grid::check(grids, merge)?;
        let mut plan = Self {
            order: Vec::new(),
            windows: Arc::default(),
            frames: Arc::default(),
            positions: Vec::new(),
        };
        let (mut windows, mut frames) = (vec![0], vec![0]);
        for &[t, h, w] in grids {
            for _ in 0..t {
                plan.add_frame_windows(config, [h, w], &mut windows);
                plan.positions.extend(grid::positions([h, w], merge));
                frames.push(plan.positions.len() as u32);
            }
        }
        (plan.windows, plan.frames) = (windows.into(), frames.into());
        Ok(plan)
    }

    /// Patches.
    pub fn patches(&self) -> usize {
        self.positions.len()
    }

    /// For each raster square, its place in window order: the inverse of `order`.
    pub fn places(&self) -> Vec<u32> {
        let mut places = vec![0; self.order.len()];
        for (place, &raster) in self.order.iter().enumerate() {
            places[raster as usize] = place as u32;
        }
        places
    }

    /// `(row, column)` of each patch in its frame, in window order; `merge_unit` patches make a square.
    pub fn positions_in_windows(&self, merge_unit: usize) -> impl Iterator<Item = [u32; 2]> {
        let squares = self.order.iter().map(move |&square| square as usize * merge_unit);
        squares.flat_map(move |first| self.positions[first..first + merge_unit].iter().copied())
    }

    /// Attention within windows.
    pub fn window_mask(&self) -> AttentionMask {
        AttentionMask::Segments(self.windows.clone())
    }

    /// Attention within frames.
    pub fn frame_mask(&self) -> AttentionMask {
        AttentionMask::Segments(self.frames.clone())
    }

    /// Rows of `width` values per patch, which lie in pieces of whole images, from raster to window order,
    /// and of each value what `convert` makes of it.
    pub fn permute<V>(
        &self,
        pieces: &[&[f32]],
        width: usize,
        merge_unit: usize,
        convert: impl Fn(f32) -> V,
    ) -> Vec<V> {
        let square = merge_unit * width;
        let mut out = Vec::with_capacity(self.order.len() * square);
        // Windows never cross images, so the pieces are gone through once.
        let (mut piece, mut begin) = (0, 0);
        for &raster in &self.order {
            let start = raster as usize * square;
            while start >= begin + pieces[piece].len() {
                begin += pieces[piece].len();
                piece += 1;
            }
            out.extend(pieces[piece][start - begin..][..square].iter().map(|value| convert(*value)));
        }
        out
    }

    fn add_frame_windows(&mut self, config: &VisionConfig, [h, w]: [u32; 2], windows: &mut Vec<u32>) {
        let (merge, side) = (config.spatial_merge_size as u32, config.window_tokens() as u32);
        let [rows, columns] = [h / merge, w / merge];
        let first = self.order.len() as u32;
        for top in (0..rows).step_by(side as usize) {
            for left in (0..columns).step_by(side as usize) {
                for row in top..(top + side).min(rows) {
                    self.order.extend(
                        (left..(left + side).min(columns)).map(|column| first + row * columns + column),
                    );
                }
                windows.push(self.order.len() as u32 * merge * merge);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> VisionConfig {
        VisionConfig {
            depth: 1,
            hidden_size: 8,
            intermediate_size: 8,
            num_heads: 1,
            head_dim: 8,
            in_channels: 3,
            patch_size: 14,
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            window_size: 56,
            out_hidden_size: 8,
            full_attention_blocks: vec![],
            rope_theta: 1e4,
        }
    }

    #[test]
    fn a_frame_that_windows_divide_has_no_empty_windows() {
        let plan = WindowPlan::new(&config(), &[[1, 8, 4]]).unwrap();
        assert_eq!(plan.order, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(*plan.windows, [0, 16, 32]);
        assert_eq!(*plan.frames, [0, 32]);
    }

    #[test]
    fn edge_windows_are_smaller_and_places_invert_the_order() {
        let plan = WindowPlan::new(&config(), &[[1, 2, 2], [1, 4, 6]]).unwrap();
        assert_eq!(plan.order, [0, 1, 2, 4, 5, 3, 6]);
        assert_eq!(*plan.windows, [0, 4, 20, 28]);
        assert_eq!(*plan.frames, [0, 4, 28]);
        let places = plan.places();
        assert!(
            plan.order.iter().enumerate().all(|(place, &raster)| places[raster as usize] == place as u32)
        );
    }

    #[test]
    fn positions_follow_merged_squares() {
        let plan = WindowPlan::new(&config(), &[[1, 2, 4]]).unwrap();
        assert_eq!(plan.positions, [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]);
    }

    #[test]
    fn patches_in_pieces_of_whole_images_move_as_they_do_in_one() {
        let plan = WindowPlan::new(&config(), &[[1, 2, 2], [1, 4, 6], [1, 2, 4]]).unwrap();
        let rows: Vec<f32> = (0..36 * 3).map(|value| value as f32).collect();
        let whole = plan.permute(&[&rows], 3, 4, |value| value);
        assert_eq!(whole[..3 * 12], [&rows[..12], &rows[12..36]].concat());
        let (first, others) = rows.split_at(4 * 3);
        let (second, third) = others.split_at(24 * 3);
        assert_eq!(plan.permute(&[first, second, third], 3, 4, |value| value), whole);
        assert_eq!(plan.permute(&[first, others], 3, 4, |value| value), whole);
    }

    #[test]
    fn a_grid_that_cannot_be_merged_is_refused() {
        let error = WindowPlan::new(&config(), &[[1, 2, 2], [1, 3, 4]]).unwrap_err();
        assert_eq!(error, TokenError::Grid { image: 1, grid: [1, 3, 4], merge: 2 });
    }
}
