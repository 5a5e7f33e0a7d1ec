//! Kept features have no padding, a model's tensors have: `[b * s, d]`, a row's tokens at its valid range.
//! Here the one is made of the other.
//!
//! What lies at padding is zero where features were kept, and whatever the model computes where not; no token
//! attends to it and no gradient comes from it, so losses and gradients are the same to the bit.

use crate::pretrained::prompts::Rows;

/// Features of `width` in their rows' valid ranges among `tokens`, `[tokens, width]`; none if they are as
/// they lie.
pub fn padded(rows: Rows<'_>, tokens: usize, width: usize, values: &[f32]) -> Option<Vec<f32>> {
    if values.len() == tokens * width {
        return None;
    }
    let mut padded = vec![0.0; tokens * width];
    let mut rest = values;
    for cells in rows.cells(tokens) {
        let place = &mut padded[cells.start * width..cells.end * width];
        let (own, others) = rest.split_at(place.len());
        place.copy_from_slice(own);
        rest = others;
    }
    Some(padded)
}

/// The valid tokens of `[tokens, width]` values, one after another.
pub fn without_padding(rows: Rows<'_>, tokens: usize, width: usize, values: Vec<f32>) -> Vec<f32> {
    let cells = rows.cells(tokens);
    let valid: usize = cells.iter().map(ExactSizeIterator::len).sum();
    if valid == tokens {
        return values;
    }
    let mut kept = Vec::with_capacity(valid * width);
    cells
        .into_iter()
        .for_each(|cells| kept.extend_from_slice(&values[cells.start * width..cells.end * width]));
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_no_padding_and_comes_back_where_it_was() {
        let valid = [1..3, 0..1];
        let rows = Rows::Padded(&valid);
        let values: Vec<f32> = (0u8..12).map(f32::from).collect();
        let kept = without_padding(rows, 6, 2, values);
        assert_eq!(kept, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let back = padded(rows, 6, 2, &kept).expect("there is padding");
        assert_eq!(back, [0.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0]);
        let whole = Rows::Padded(&[0..3]);
        assert_eq!(padded(whole, 3, 2, &back[..6]), None);
        assert_eq!(without_padding(whole, 3, 2, back[..6].to_vec()), back[..6]);
    }
}
