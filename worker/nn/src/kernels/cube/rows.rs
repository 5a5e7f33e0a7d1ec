//! Norms over the rows of a matrix, and their gradients: one cube a row, which is read twice and is in cache
//! the second time.

use burn_cubecl::{CubeElement, CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;

use super::launch::{by_element, by_row, cube_sum, empty, empty_like, lanes, len, vector, width};

/// `x * rsqrt(mean(x^2) + eps) * gain`, row by row, rounded to the type of the output.
pub fn rms_norm<R: CubeRuntime, O: CubeElement + Float>(
    x_nd: CubeTensor<R>,
    gain_d: CubeTensor<R>,
    eps: f64,
) -> CubeTensor<R> {
    let y_nd = empty(&x_nd, x_nd.meta.shape().clone(), O::dtype());
    let (d, client) = (width(&x_nd), x_nd.client.clone());
    let (count, dim) = by_row(&x_nd, len(&x_nd) / d, d / vector(d));
    rms_norm_kernel::launch::<O, R>(
        &client,
        count,
        dim,
        vector(d),
        x_nd.into_array_arg(),
        gain_d.into_array_arg(),
        y_nd.clone().into_array_arg(),
        (d / vector(d)) as u32,
        1.0 / d as f32,
        eps as f32,
    );
    y_nd
}

#[cube(launch)]
fn rms_norm_kernel<N: Size, O: Float>(
    x: &Array<Vector<f32, N>>,
    gain: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<O, N>>,
    vectors: u32,
    per_element: f32,
    eps: f32,
) {
    let begin = CUBE_POS * vectors as usize;
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        let value = x[begin + i as usize];
        squares += value * value;
        i += CUBE_DIM;
    }
    let root = f32::inverse_sqrt(cube_sum(lanes(squares)) * per_element + eps);
    let mut i = UNIT_POS;
    while i < vectors {
        y[begin + i as usize] =
            Vector::cast_from(x[begin + i as usize] * Vector::new(root) * gain[i as usize]);
        i += CUBE_DIM;
    }
}

/// The gradient of `x` under [`rms_norm`]: `r g dy - x r^3 mean(x g dy)`, with `r = rsqrt(mean(x^2) + eps)`;
/// added to `sum`, if there is one.
pub fn rms_norm_backward<R: CubeRuntime>(
    x_nd: CubeTensor<R>,
    gain_d: CubeTensor<R>,
    dy_nd: CubeTensor<R>,
    sum_nd: Option<CubeTensor<R>>,
    eps: f64,
) -> CubeTensor<R> {
    let (dx_nd, d, client) = (empty_like(&x_nd), width(&x_nd), x_nd.client.clone());
    let (count, dim) = by_row(&x_nd, len(&x_nd) / d, d / vector(d));
    let summed = sum_nd.is_some();
    rms_norm_backward_kernel::launch::<R>(
        &client,
        count,
        dim,
        vector(d),
        x_nd.clone().into_array_arg(),
        gain_d.into_array_arg(),
        dy_nd.into_array_arg(),
        // What is absent is never read.
        sum_nd.unwrap_or(x_nd).into_array_arg(),
        dx_nd.clone().into_array_arg(),
        (d / vector(d)) as u32,
        1.0 / d as f32,
        eps as f32,
        summed,
    );
    dx_nd
}

#[cube(launch)]
fn rms_norm_backward_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    gain: &Array<Vector<f32, N>>,
    dy: &Array<Vector<f32, N>>,
    sum: &Array<Vector<f32, N>>,
    dx: &mut Array<Vector<f32, N>>,
    vectors: u32,
    per_element: f32,
    eps: f32,
    #[comptime] summed: bool,
) {
    let begin = CUBE_POS * vectors as usize;
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut products = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        let value = x[begin + i as usize];
        squares += value * value;
        products += value * gain[i as usize] * dy[begin + i as usize];
        i += CUBE_DIM;
    }
    let root = f32::inverse_sqrt(cube_sum(lanes(squares)) * per_element + eps);
    let along = cube_sum(lanes(products)) * per_element * root * root * root;
    let mut i = UNIT_POS;
    while i < vectors {
        let at = begin + i as usize;
        let mut pull = gain[i as usize] * dy[at] * Vector::new(root) - x[at] * Vector::new(along);
        if summed {
            pull += sum[at];
        }
        dx[at] = pull;
        i += CUBE_DIM;
    }
}

/// Scales and shifts side by side, `[b, 2 d]`, one row for each batch row of `n / b` rows; and whether shifts
/// come first.
pub type Modulation<R> = (CubeTensor<R>, bool);

/// `(x - mean) / sqrt(variance + eps)`, row by row; then, if so, `* (1 + scale) + shift`.
pub fn layer_norm<R: CubeRuntime>(
    x_nd: CubeTensor<R>,
    modulation: Option<Modulation<R>>,
    eps: f64,
) -> CubeTensor<R> {
    let (y_nd, d, client) = (empty_like(&x_nd), width(&x_nd), x_nd.client.clone());
    let rows = len(&x_nd) / d;
    let (count, dim) = by_row(&x_nd, rows, d / vector(d));
    let modulated = modulation.is_some();
    // What is absent is never read.
    let (ada_be, shift_first) = modulation.unwrap_or_else(|| (x_nd.clone(), false));
    let per_batch = rows / (len(&ada_be) / (2 * d)).max(1);
    layer_norm_kernel::launch::<R>(
        &client,
        count,
        dim,
        vector(d),
        x_nd.into_array_arg(),
        ada_be.into_array_arg(),
        y_nd.clone().into_array_arg(),
        (d / vector(d)) as u32,
        per_batch.max(1) as u32,
        1.0 / d as f32,
        eps as f32,
        modulated,
        shift_first,
    );
    y_nd
}

/// Where the scales and shifts of a cube's row begin.
#[cube]
fn modulation(vectors: u32, rows_per_batch: u32, #[comptime] shift_first: bool) -> (usize, usize) {
    let begin = CUBE_POS / rows_per_batch as usize * 2 * vectors as usize;
    let half = vectors as usize;
    let mut at = (begin, begin + half);
    if shift_first {
        at = (begin + half, begin);
    }
    at
}

#[cube(launch)]
fn layer_norm_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    ada: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<f32, N>>,
    vectors: u32,
    rows_per_batch: u32,
    per_element: f32,
    eps: f32,
    #[comptime] modulated: bool,
    #[comptime] shift_first: bool,
) {
    let begin = CUBE_POS * vectors as usize;
    let (scale, shift) = modulation(vectors, rows_per_batch, shift_first);
    let mut sums = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        sums += x[begin + i as usize];
        i += CUBE_DIM;
    }
    let mean = Vector::<f32, N>::new(cube_sum(lanes(sums)) * per_element);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        let centred = x[begin + i as usize] - mean;
        squares += centred * centred;
        i += CUBE_DIM;
    }
    let root = f32::inverse_sqrt(cube_sum(lanes(squares)) * per_element + eps);
    let mut i = UNIT_POS;
    while i < vectors {
        let normed = (x[begin + i as usize] - mean) * Vector::new(root);
        if modulated {
            y[begin + i as usize] =
                normed * (ada[scale + i as usize] + Vector::new(1.0)) + ada[shift + i as usize];
        } else {
            y[begin + i as usize] = normed;
        }
        i += CUBE_DIM;
    }
}

/// The gradient of `x` under [`layer_norm`], added to `sum`, if there is one; and `dy` times the normalised
/// `x`, if it is modulated. With `h = (x - mean) r` and `g = dy (1 + scale)`: `r (g - mean(g) - h mean(g
/// h))`.
pub fn layer_norm_backward<R: CubeRuntime>(
    x_nd: CubeTensor<R>,
    modulation: Option<Modulation<R>>,
    dy_nd: CubeTensor<R>,
    sum_nd: Option<CubeTensor<R>>,
    eps: f64,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let (dx_nd, d, client) = (empty_like(&x_nd), width(&x_nd), x_nd.client.clone());
    let rows = len(&x_nd) / d;
    let (count, dim) = by_row(&x_nd, rows, d / vector(d));
    let (modulated, summed) = (modulation.is_some(), sum_nd.is_some());
    // Written only where it is read; what is absent is never read.
    let products_nd = if modulated { empty_like(&x_nd) } else { dx_nd.clone() };
    let (ada_be, shift_first) = modulation.unwrap_or_else(|| (x_nd.clone(), false));
    let per_batch = rows / (len(&ada_be) / (2 * d)).max(1);
    layer_norm_backward_kernel::launch::<R>(
        &client,
        count,
        dim,
        vector(d),
        x_nd.clone().into_array_arg(),
        ada_be.into_array_arg(),
        dy_nd.into_array_arg(),
        sum_nd.unwrap_or(x_nd).into_array_arg(),
        dx_nd.clone().into_array_arg(),
        products_nd.clone().into_array_arg(),
        (d / vector(d)) as u32,
        per_batch.max(1) as u32,
        1.0 / d as f32,
        eps as f32,
        modulated,
        shift_first,
        summed,
    );
    (dx_nd, products_nd)
}

#[cube(launch)]
fn layer_norm_backward_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    ada: &Array<Vector<f32, N>>,
    dy: &Array<Vector<f32, N>>,
    sum: &Array<Vector<f32, N>>,
    dx: &mut Array<Vector<f32, N>>,
    products: &mut Array<Vector<f32, N>>,
    vectors: u32,
    rows_per_batch: u32,
    per_element: f32,
    eps: f32,
    #[comptime] modulated: bool,
    #[comptime] shift_first: bool,
    #[comptime] summed: bool,
) {
    let begin = CUBE_POS * vectors as usize;
    let (scale, _) = modulation(vectors, rows_per_batch, shift_first);
    let mut sums = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        sums += x[begin + i as usize];
        i += CUBE_DIM;
    }
    let mean = Vector::<f32, N>::new(cube_sum(lanes(sums)) * per_element);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut pulls = Vector::<f32, N>::new(0.0);
    let mut along = Vector::<f32, N>::new(0.0);
    let mut i = UNIT_POS;
    while i < vectors {
        let centred = x[begin + i as usize] - mean;
        let mut pull = dy[begin + i as usize];
        if modulated {
            pull *= ada[scale + i as usize] + Vector::new(1.0);
        }
        squares += centred * centred;
        pulls += pull;
        along += pull * centred;
        i += CUBE_DIM;
    }
    let root = f32::inverse_sqrt(cube_sum(lanes(squares)) * per_element + eps);
    let pull_mean = Vector::<f32, N>::new(cube_sum(lanes(pulls)) * per_element);
    let along_mean = Vector::<f32, N>::new(cube_sum(lanes(along)) * per_element * root);
    let root = Vector::<f32, N>::new(root);
    let mut i = UNIT_POS;
    while i < vectors {
        let at = begin + i as usize;
        let normed = (x[at] - mean) * root;
        let mut pull = dy[at];
        if modulated {
            products[at] = pull * normed;
            pull *= ada[scale + i as usize] + Vector::new(1.0);
        }
        let mut gradient = (pull - pull_mean - normed * along_mean) * root;
        if summed {
            gradient += sum[at];
        }
        dx[at] = gradient;
        i += CUBE_DIM;
    }
}

/// The gradient of scales and shifts as they lie: sums of `products` and of `dy` over the rows of a batch
/// row, one after another.
pub fn ada_gradient<R: CubeRuntime>(
    ada_be: CubeTensor<R>,
    shift_first: bool,
    products_nd: CubeTensor<R>,
    dy_nd: CubeTensor<R>,
) -> CubeTensor<R> {
    let (dada_be, d, client) = (empty_like(&ada_be), width(&dy_nd), ada_be.client.clone());
    let (lanes, batch) = (vector(d), len(&ada_be) / (2 * d));
    let (count, dim) = by_element(len(&ada_be) / lanes);
    ada_gradient_kernel::launch::<R>(
        &client,
        count,
        dim,
        lanes,
        products_nd.into_array_arg(),
        dy_nd.clone().into_array_arg(),
        dada_be.clone().into_array_arg(),
        (d / lanes) as u32,
        (len(&dy_nd) / d / batch.max(1)) as u32,
        shift_first,
    );
    dada_be
}

#[cube(launch)]
fn ada_gradient_kernel<N: Size>(
    products: &Array<Vector<f32, N>>,
    dy: &Array<Vector<f32, N>>,
    dada: &mut Array<Vector<f32, N>>,
    vectors: u32,
    rows_per_batch: u32,
    #[comptime] shift_first: bool,
) {
    if ABSOLUTE_POS < dada.len() {
        let vectors = vectors as usize;
        let (batch, place) = (ABSOLUTE_POS / (2 * vectors), ABSOLUTE_POS % (2 * vectors));
        let of_shift = (place < vectors) == shift_first;
        let mut at = batch * rows_per_batch as usize * vectors + place % vectors;
        let mut sum = Vector::<f32, N>::new(0.0);
        for _row in 0..rows_per_batch {
            if of_shift {
                sum += dy[at];
            } else {
                sum += products[at];
            }
            at += vectors;
        }
        dada[ABSOLUTE_POS] = sum;
    }
}
