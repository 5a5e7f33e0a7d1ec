//! Patches of images: where they are in their image, and which belong together. Host integers only.
//!
//! Rows of patches come as preprocessing makes them: merged squares in raster order, `merge * merge` patches
//! each. Agrees with Transformers' `get_vision_position_ids` and `get_vision_cu_seqlens`.

use crate::pretrained::{error::TokenError, pictures::ImageShape};

/// Refuses grids that cannot be merged.
pub fn check(grids: &[ImageShape], merge: usize) -> Result<(), TokenError> {
    for (image, &grid) in grids.iter().enumerate() {
        let [t, h, w] = grid.map(|side| side as usize);
        if t == 0 || h == 0 || w == 0 || h % merge != 0 || w % merge != 0 {
            return Err(TokenError::Grid { image, grid, merge });
        }
    }
    Ok(())
}

/// `(row, column)` of each patch of a frame of `h x w` patches.
pub fn positions([h, w]: [u32; 2], merge: usize) -> impl Iterator<Item = [u32; 2]> {
    let merge = merge as u32;
    let squares = (0..h / merge).flat_map(move |row| (0..w / merge).map(move |column| (row, column)));
    squares.flat_map(move |(top, left)| {
        (0..merge * merge).map(move |inside| [top * merge + inside / merge, left * merge + inside % merge])
    })
}
