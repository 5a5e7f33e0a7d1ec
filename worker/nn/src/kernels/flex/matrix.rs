//! Matrix views with strides, views that are written to side by side, and the product of two on one thread.
//!
//! [`MatMut`] can be cut into blocks of rows and of columns that never share an element, so that tasks write
//! the heads of an attention output or the panels of a linear layer where they belong, without a copy.
//! [`product`] is the border to the `gemm` crate: the shapes are checked when a view is made, and a product
//! of one shape always adds in one order.
//!
//! Products run on one thread each: work is cut in a way that depends on its shape alone ([`build`], or the
//! caller), because the `gemm` crate's own threading packs a transposed operand on one thread while the
//! others wait.
//!
//! An element of a product depends on its row of the one factor, its column of the other and the inner
//! dimension alone, bit for bit, as long as that is at least 3: not on how many other rows and columns there
//! are. The crate's tiles all add in the order of the inner dimension; what would add otherwise is kept from
//! it: cuts of the inner dimension that depend on the other two ([`DEPTH`]), matrix-vector products
//! ([`doubled`]), and very small ones ([`FEW`]).

use std::{marker::PhantomData, ops::Range};

use super::parallel::{self, Work};

/// A matrix to read: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A matrix of contiguous rows, `row_stride` apart.
    pub fn new(data: &'a [f32], [rows, cols]: [usize; 2], row_stride: usize) -> Self {
        if rows > 0 && cols > 0 {
            assert!((rows - 1) * row_stride + cols <= data.len(), "a matrix view reaches past its data");
        }
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// The given columns.
    pub fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }

    /// The given rows.
    pub fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows outside a matrix view");
        let start = (range.start * self.row_stride).min(self.data.len());
        Self { data: &self.data[start..], rows: range.len(), ..self }
    }

    /// From its first element on.
    pub fn data(&self) -> &'a [f32] {
        self.data
    }

    /// One contiguous row.
    pub fn row(&self, i: usize) -> &'a [f32] {
        debug_assert_eq!(self.col_stride, 1, "rows of a transposed view are not contiguous");
        assert!(i < self.rows, "row outside a matrix view");
        &self.data[i * self.row_stride..][..self.cols]
    }
}

/// A matrix of contiguous rows to write to, possibly beside others in one buffer.
pub struct MatMut<'a> {
    /// Row `i` is the `cols` elements from `pointer + i * row_stride`; nothing else reaches them during `'a`.
    pointer: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a view is the only way to its elements, as `&mut [f32]` is, which may move to another thread.
unsafe impl Send for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// All of `data` as `[rows, cols]`.
    pub fn new(data: &'a mut [f32], [rows, cols]: [usize; 2]) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix view must cover its data");
        Self { pointer: data.as_mut_ptr(), rows, cols, row_stride: cols, owner: PhantomData }
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// The rows before `at` and those from it on.
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "rows outside a matrix view");
        let Self { pointer, rows, cols, row_stride, owner } = self;
        // An empty rest may start past the end of the buffer: its pointer is never read.
        let rest = pointer.wrapping_add(at * row_stride);
        (
            Self { pointer, rows: at, cols, row_stride, owner },
            Self { pointer: rest, rows: rows - at, cols, row_stride, owner },
        )
    }

    /// The columns before `at` and those from it on.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "columns outside a matrix view");
        let Self { pointer, rows, cols, row_stride, owner } = self;
        let rest = pointer.wrapping_add(at);
        (
            Self { pointer, rows, cols: at, row_stride, owner },
            Self { pointer: rest, rows, cols: cols - at, row_stride, owner },
        )
    }

    /// The given rows, for as long as this view is not used.
    pub fn part(&mut self, range: Range<usize>) -> MatMut<'_> {
        assert!(range.start <= range.end && range.end <= self.rows, "rows outside a matrix view");
        let pointer = self.pointer.wrapping_add(range.start * self.row_stride);
        MatMut {
            pointer,
            rows: range.len(),
            cols: self.cols,
            row_stride: self.row_stride,
            owner: PhantomData,
        }
    }

    /// Cut into consecutive blocks of the given numbers of rows; what is left over is dropped.
    pub fn row_blocks(self, heights: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let mut rest = self;
        let mut blocks = Vec::new();
        for height in heights {
            let (block, below) = rest.split_rows(height);
            blocks.push(block);
            rest = below;
        }
        blocks
    }

    /// Cut into consecutive blocks of `width` columns.
    pub fn col_blocks(self, width: usize) -> Vec<Self> {
        let mut rest = self;
        let mut blocks = Vec::new();
        while rest.cols > 0 {
            let at = width.min(rest.cols);
            let (block, right) = rest.split_cols(at);
            blocks.push(block);
            rest = right;
        }
        blocks
    }

    /// One row.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row outside a matrix view");
        // SAFETY: row `i` lies within the buffer the view was made from, is reached by this view alone, and
        // the view is borrowed mutably for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(i * self.row_stride), self.cols) }
    }
}

/// Part of a new buffer that holds nothing yet: writing all of it makes a [`MatMut`].
pub struct UnwrittenMat<'a>(MatMut<'a>);

impl<'a> UnwrittenMat<'a> {
    /// Every element `value`.
    pub fn filled(self, value: f32) -> MatMut<'a> {
        for i in 0..self.0.rows {
            for j in 0..self.0.cols {
                // SAFETY: within the view, whose elements may be written before they are read.
                unsafe { self.0.pointer.add(i * self.0.row_stride + j).write(value) };
            }
        }
        self.0
    }

    /// The transpose of `from`, whose rows are `stride` apart.
    pub fn transposed(self, from: &[f32], stride: usize) -> MatMut<'a> {
        assert!(self.0.rows <= stride, "the rows of a matrix overlap");
        for i in 0..self.0.rows {
            for j in 0..self.0.cols {
                // SAFETY: within the view, whose elements may be written before they are read.
                unsafe { self.0.pointer.add(i * self.0.row_stride + j).write(from[j * stride + i]) };
            }
        }
        self.0
    }

    /// `a b`, as [`panel_product`].
    pub fn panel_product(mut self, a: Mat<'_>, b: Mat<'_>) -> MatMut<'a> {
        panel_product(&mut self.0, Accumulate::Fresh, a, b);
        self.0
    }

    /// `scale * a b`.
    pub fn product(mut self, scale: f32, a: Mat<'_>, b: Mat<'_>) -> MatMut<'a> {
        product(&mut self.0, Accumulate::Fresh, scale, a, b);
        self.0
    }
}

/// A new `[rows, cols]` buffer, made in blocks of `width` columns on all threads. `write` gets every block
/// once, with its range of columns, and hands it back written; `work` is what all of it takes.
pub fn build(
    [rows, cols]: [usize; 2],
    width: usize,
    work: Work,
    write: impl for<'a> Fn(Range<usize>, UnwrittenMat<'a>) -> MatMut<'a> + Sync,
) -> Vec<f32> {
    let mut buffer = Vec::<f32>::with_capacity(rows * cols);
    let pointer = buffer.as_mut_ptr();
    let whole = MatMut { pointer, rows, cols, row_stride: cols, owner: PhantomData };
    let blocks = whole.col_blocks(width).into_iter().map(UnwrittenMat).enumerate().collect();
    parallel::for_each(blocks, work, |(i, block)| {
        let start = i * width;
        let range = start..start + block.0.cols;
        write(range, block);
    });
    // SAFETY: the capacity is at least this; the blocks cover the buffer, and only a written one could be
    // handed back.
    unsafe { buffer.set_len(rows * cols) };
    buffer
}

/// What a product does with what its destination holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accumulate {
    /// Overwrites it.
    Fresh,
    /// Adds to it.
    Sum,
}

/// Rows of a product up to which the crate reads a `b` of contiguous rows where it lies, as long as their
/// length is a multiple of [`REGISTER`]: `DEFAULT_LHS_PACKING_THRESHOLD_SINGLE_THREAD` times the height of
/// its tile. Beyond, it copies `b` first.
pub const UNCOPIED: usize = 48;

/// Values of the widest register.
pub const REGISTER: usize = 16;

/// Inner dimension of what the crate is given at once: up to here it never cuts it itself.
const DEPTH: usize = 512;

/// Elements of a product up to which the crate adds in another order, if both factors are contiguous along
/// the inner dimension.
const FEW: usize = 256;

/// `dst = scale * a b`, or `dst += scale * a b`, on the calling thread.
pub fn product(dst: &mut MatMut<'_>, accumulate: Accumulate, scale: f32, a: Mat<'_>, b: Mat<'_>) {
    assert_eq!([a.rows, b.cols], dst.shape(), "a product and its destination differ in shape");
    assert_eq!(a.cols, b.rows, "the factors of a product do not fit");
    if a.rows == 1 || b.cols == 1 {
        return doubled(dst, accumulate, scale, a, b);
    }
    if a.rows * b.cols <= FEW && a.col_stride == 1 && b.row_stride == 1 {
        let mut copy = vec![0.0; b.rows * b.cols];
        for (k, row) in copy.chunks_exact_mut(b.cols).enumerate() {
            row.iter_mut().enumerate().for_each(|(j, value)| *value = b.data[j * b.col_stride + k]);
        }
        return product(dst, accumulate, scale, a, Mat::new(&copy, [b.rows, b.cols], b.cols));
    }
    let (mut accumulate, mut start) = (accumulate, 0);
    loop {
        let end = (start + DEPTH).min(a.cols);
        piece(dst, accumulate, scale, a.cols(start..end), b.rows(start..end));
        if end == a.cols {
            return;
        }
        (accumulate, start) = (Accumulate::Sum, end);
    }
}

/// A product of one row or one column: the crate has routines for these that add in another order, so it is
/// given two alike.
fn doubled(dst: &mut MatMut<'_>, accumulate: Accumulate, scale: f32, a: Mat<'_>, b: Mat<'_>) {
    let [rows, cols] = dst.shape();
    let two = |n: usize| if n == 1 { 2 } else { n };
    let shape = [two(rows), two(cols)];
    // A stride of 0 reads the same row twice.
    let a = Mat { rows: shape[0], row_stride: if rows == 1 { 0 } else { a.row_stride }, ..a };
    let b = Mat { cols: shape[1], col_stride: if cols == 1 { 0 } else { b.col_stride }, ..b };
    let mut values = vec![0.0; shape[0] * shape[1]];
    let of = |i: usize, n: usize| if n == 1 { 0 } else { i };
    if accumulate == Accumulate::Sum {
        for (i, row) in values.chunks_exact_mut(shape[1]).enumerate() {
            let from = dst.row(of(i, rows));
            row.iter_mut().enumerate().for_each(|(j, value)| *value = from[of(j, cols)]);
        }
    }
    product(&mut MatMut::new(&mut values, shape), accumulate, scale, a, b);
    for (i, row) in values.chunks_exact(shape[1]).enumerate().take(rows) {
        dst.row(i).copy_from_slice(&row[..cols]);
    }
}

fn piece(dst: &mut MatMut<'_>, accumulate: Accumulate, scale: f32, a: Mat<'_>, b: Mat<'_>) {
    let read = accumulate == Accumulate::Sum;
    // SAFETY: every element of the three matrices lies within the memory that its view borrows (checked when
    // the views were made, and kept by cutting them), the destination is borrowed mutably and so overlaps
    // neither factor, and elements that are not read are only written.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            dst.pointer,
            1,
            dst.row_stride as isize,
            read,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// [`product`] with a `b` whose rows are contiguous and as wide as the crate's register tile, read where it
/// lies.
///
/// It gets [`UNCOPIED`] rows at a time.
pub fn panel_product(dst: &mut MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>) {
    for start in (0..a.rows).step_by(UNCOPIED) {
        let rows = start..(start + UNCOPIED).min(a.rows);
        product(&mut dst.part(rows.clone()), accumulate, 1.0, a.rows(rows), b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_lands_in_its_block_and_nowhere_else() {
        let a: Vec<f32> = (0..6).map(|x| x as f32).collect();
        let b: Vec<f32> = (0..12).map(|x| 1.0 - x as f32).collect();
        let mut c = vec![7.0; 5 * 8];
        let (_, below) = MatMut::new(&mut c, [5, 8]).split_rows(1);
        let mut blocks = below.row_blocks([2, 2]).remove(0).col_blocks(4);
        product(&mut blocks[1], Accumulate::Fresh, 2.0, Mat::new(&a, [2, 3], 3), Mat::new(&b, [3, 4], 4));
        product(&mut blocks[1], Accumulate::Sum, 1.0, Mat::new(&a, [2, 3], 3), Mat::new(&b, [4, 3], 3).t());
        for (i, &x) in c.iter().enumerate() {
            let (row, col) = (i / 8, i % 8);
            let expected = if (1..3).contains(&row) && col >= 4 {
                (0..3).map(|k| a[(row - 1) * 3 + k] * (2.0 * b[k * 4 + col - 4] + b[(col - 4) * 3 + k])).sum()
            } else {
                7.0
            };
            assert_eq!(x, expected, "element {i}");
        }
    }

    #[test]
    fn a_buffer_is_built_by_blocks_of_columns() {
        let row: Vec<f32> = (0..10).map(|x| x as f32).collect();
        let thrice: Vec<f32> = row.iter().flat_map(|&x| [x; 3]).collect();
        let built = build([3, 10], 4, Work::values(30), |range, block| {
            block.transposed(&thrice[3 * range.start..3 * range.end], 3)
        });
        assert_eq!(built, row.repeat(3));
        assert_eq!(build([2, 3], 8, Work::values(6), |_, block| block.filled(5.0)), [5.0; 6]);
        assert!(build([0, 3], 8, Work::values(0), |_, block| block.filled(5.0)).is_empty());
    }

    #[test]
    fn an_element_does_not_depend_on_its_neighbours() {
        let value = |i: usize| ((i * 7919) % 1000) as f32 / 311.0 - 1.5;
        for depth in [3, 16, 511, 512, 513, 1500] {
            let (rows, cols) = (67, 50);
            let a: Vec<f32> = (0..rows * depth).map(value).collect();
            let b: Vec<f32> = (0..cols * depth).map(value).collect();
            let (a, b) = (Mat::new(&a, [rows, depth], depth), Mat::new(&b, [cols, depth], depth).t());
            let of = |accumulate, rows: Range<usize>, cols: Range<usize>| {
                let shape = [rows.len(), cols.len()];
                let mut dst = vec![0.25; shape[0] * shape[1]];
                product(&mut MatMut::new(&mut dst, shape), accumulate, 1.0, a.rows(rows), b.cols(cols));
                dst
            };
            for accumulate in [Accumulate::Fresh, Accumulate::Sum] {
                let whole = of(accumulate, 0..rows, 0..cols);
                for (row, col) in [(0, 0), (13, 49), (66, 7)] {
                    let expected = [whole[row * cols + col]];
                    assert_eq!(of(accumulate, row..row + 1, col..col + 1), expected, "{depth} alone");
                    assert_eq!(
                        of(accumulate, row..row + 1, 0..cols)[col..][..1],
                        expected,
                        "{depth} in its row"
                    );
                    assert_eq!(
                        of(accumulate, 0..rows, col..col + 1)[row..][..1],
                        expected,
                        "{depth} in its column"
                    );
                    assert_eq!(
                        of(accumulate, row..rows, col..cols)[..1],
                        expected,
                        "{depth} first of a part"
                    );
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "past its data")]
    fn a_view_past_its_data_is_refused() {
        let _ = Mat::new(&[0.0; 5], [2, 3], 3);
    }
}
