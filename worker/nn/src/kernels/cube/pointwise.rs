//! Operations on elements, each with its gradient: one unit a vector.

use burn::tensor::DType;
use burn_cubecl::{CubeElement, CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::launch::{by_element, empty, empty_like, len, vector, width};

/// `silu(gate) * up`, rounded to the type of the output.
pub fn swiglu<R: CubeRuntime, O: CubeElement + Float>(
    gate: CubeTensor<R>,
    up: CubeTensor<R>,
) -> CubeTensor<R> {
    let y = empty(&gate, gate.meta.shape().clone(), O::dtype());
    let (client, lanes) = (gate.client.clone(), vector(len(&gate)));
    let (count, dim) = by_element(len(&gate) / lanes);
    swiglu_kernel::launch::<O, R>(
        &client,
        count,
        dim,
        lanes,
        gate.into_array_arg(),
        up.into_array_arg(),
        y.clone().into_array_arg(),
    );
    y
}

#[cube(launch)]
fn swiglu_kernel<N: Size, O: Float>(
    gate: &Array<Vector<f32, N>>,
    up: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<O, N>>,
) {
    if ABSOLUTE_POS < y.len() {
        let gate = gate[ABSOLUTE_POS];
        y[ABSOLUTE_POS] = Vector::cast_from(gate * sigmoid(gate) * up[ABSOLUTE_POS]);
    }
}

/// The gradients of gate and up under [`swiglu`].
pub fn swiglu_backward<R: CubeRuntime>(
    gate: CubeTensor<R>,
    up: CubeTensor<R>,
    dy: CubeTensor<R>,
) -> [CubeTensor<R>; 2] {
    let (dgate, dup) = (empty_like(&gate), empty_like(&gate));
    let (client, lanes) = (gate.client.clone(), vector(len(&gate)));
    let (count, dim) = by_element(len(&gate) / lanes);
    swiglu_backward_kernel::launch::<R>(
        &client,
        count,
        dim,
        lanes,
        gate.into_array_arg(),
        up.into_array_arg(),
        dy.into_array_arg(),
        dgate.clone().into_array_arg(),
        dup.clone().into_array_arg(),
    );
    [dgate, dup]
}

#[cube(launch)]
fn swiglu_backward_kernel<N: Size>(
    gate: &Array<Vector<f32, N>>,
    up: &Array<Vector<f32, N>>,
    dy: &Array<Vector<f32, N>>,
    dgate: &mut Array<Vector<f32, N>>,
    dup: &mut Array<Vector<f32, N>>,
) {
    if ABSOLUTE_POS < dy.len() {
        let (gate, dy) = (gate[ABSOLUTE_POS], dy[ABSOLUTE_POS]);
        let one = Vector::<f32, N>::new(1.0);
        let open = sigmoid(gate);
        dgate[ABSOLUTE_POS] = dy * up[ABSOLUTE_POS] * open * (one + gate * (one - open));
        dup[ABSOLUTE_POS] = dy * gate * open;
    }
}

/// `silu(gate) * up` of rows in which both lie side by side, `[n, 2 f]`; rounded to the type of the output.
pub fn swiglu_joined<R: CubeRuntime, I: CubeElement + Float, O: CubeElement + Float>(
    gate_up: CubeTensor<R>,
) -> CubeTensor<R> {
    let (both, rows) = (width(&gate_up), len(&gate_up) / width(&gate_up));
    let y = empty(&gate_up, [rows, both / 2].into(), O::dtype());
    let (client, lanes) = (gate_up.client.clone(), vector(both / 2));
    let (count, dim) = by_element(len(&y) / lanes);
    swiglu_joined_kernel::launch::<I, O, R>(
        &client,
        count,
        dim,
        lanes,
        gate_up.into_array_arg(),
        y.clone().into_array_arg(),
        (both / 2 / lanes) as u32,
    );
    y
}

#[cube(launch)]
fn swiglu_joined_kernel<N: Size, I: Float, O: Float>(
    gate_up: &Array<Vector<I, N>>,
    y: &mut Array<Vector<O, N>>,
    vectors: u32,
) {
    if ABSOLUTE_POS < y.len() {
        let at = gate_at(vectors);
        let gate = Vector::<f32, N>::cast_from(gate_up[at]);
        let up = Vector::<f32, N>::cast_from(gate_up[at + vectors as usize]);
        y[ABSOLUTE_POS] = Vector::cast_from(gate * sigmoid(gate) * up);
    }
}

/// The gradient of both under [`swiglu_joined`], `[n, 2 f]`; rounded likewise.
pub fn swiglu_joined_backward<R: CubeRuntime, I: CubeElement + Float, O: CubeElement + Float>(
    gate_up: CubeTensor<R>,
    dy: CubeTensor<R>,
) -> CubeTensor<R> {
    let dgate_up = empty(&gate_up, gate_up.meta.shape().clone(), O::dtype());
    let half = width(&dy);
    let (client, lanes) = (gate_up.client.clone(), vector(half));
    let (count, dim) = by_element(len(&dy) / lanes);
    swiglu_joined_backward_kernel::launch::<I, O, R>(
        &client,
        count,
        dim,
        lanes,
        gate_up.into_array_arg(),
        dy.into_array_arg(),
        dgate_up.clone().into_array_arg(),
        (half / lanes) as u32,
    );
    dgate_up
}

#[cube(launch)]
fn swiglu_joined_backward_kernel<N: Size, I: Float, O: Float>(
    gate_up: &Array<Vector<I, N>>,
    dy: &Array<Vector<f32, N>>,
    dgate_up: &mut Array<Vector<O, N>>,
    vectors: u32,
) {
    if ABSOLUTE_POS < dy.len() {
        let at = gate_at(vectors);
        let gate = Vector::<f32, N>::cast_from(gate_up[at]);
        let up = Vector::<f32, N>::cast_from(gate_up[at + vectors as usize]);
        let (dy, one) = (dy[ABSOLUTE_POS], Vector::<f32, N>::new(1.0));
        let open = sigmoid(gate);
        dgate_up[at] = Vector::cast_from(dy * up * open * (one + gate * (one - open)));
        dgate_up[at + vectors as usize] = Vector::cast_from(dy * gate * open);
    }
}

/// Where the gate of this unit's output lies; its row's ups are `vectors` behind the gates.
#[cube]
fn gate_at(vectors: u32) -> usize {
    ABSOLUTE_POS / vectors as usize * 2 * vectors as usize + ABSOLUTE_POS % vectors as usize
}

/// GELU by its tanh approximation.
pub fn gelu_tanh<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    gelu(x, false)
}

/// The gradient of `x` under [`gelu_tanh`].
pub fn gelu_tanh_backward<R: CubeRuntime>(x: CubeTensor<R>, dy: CubeTensor<R>) -> CubeTensor<R> {
    gelu_backward(x, dy, false)
}

/// GELU by the error function.
pub fn gelu_erf<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    gelu(x, true)
}

/// The gradient of `x` under [`gelu_erf`].
pub fn gelu_erf_backward<R: CubeRuntime>(x: CubeTensor<R>, dy: CubeTensor<R>) -> CubeTensor<R> {
    gelu_backward(x, dy, true)
}

fn gelu<R: CubeRuntime>(x: CubeTensor<R>, erf: bool) -> CubeTensor<R> {
    let (y, client, lanes) = (empty_like(&x), x.client.clone(), vector(len(&x)));
    let (count, dim) = by_element(len(&x) / lanes);
    gelu_kernel::launch::<R>(&client, count, dim, lanes, x.into_array_arg(), y.clone().into_array_arg(), erf);
    y
}

#[cube(launch)]
fn gelu_kernel<N: Size>(x: &Array<Vector<f32, N>>, y: &mut Array<Vector<f32, N>>, #[comptime] erf: bool) {
    if ABSOLUTE_POS < y.len() {
        let x = x[ABSOLUTE_POS];
        if erf {
            y[ABSOLUTE_POS] = x * gauss(x);
        } else {
            // (1 + tanh z) / 2 = sigmoid(2 z)
            y[ABSOLUTE_POS] = x * sigmoid(gelu_inner(x) * Vector::new(2.0));
        }
    }
}

fn gelu_backward<R: CubeRuntime>(x: CubeTensor<R>, dy: CubeTensor<R>, erf: bool) -> CubeTensor<R> {
    let (dx, client, lanes) = (empty_like(&x), x.client.clone(), vector(len(&x)));
    let (count, dim) = by_element(len(&x) / lanes);
    gelu_backward_kernel::launch::<R>(
        &client,
        count,
        dim,
        lanes,
        x.into_array_arg(),
        dy.into_array_arg(),
        dx.clone().into_array_arg(),
        erf,
    );
    dx
}

#[cube(launch)]
fn gelu_backward_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    dy: &Array<Vector<f32, N>>,
    dx: &mut Array<Vector<f32, N>>,
    #[comptime] erf: bool,
) {
    if ABSOLUTE_POS < dx.len() {
        let x = x[ABSOLUTE_POS];
        if erf {
            // The density of the normal distribution: exp(-x^2 / 2) / sqrt(2 pi).
            let density = (x * x * Vector::new(-0.5)).exp() * Vector::new(0.398_942_3);
            dx[ABSOLUTE_POS] = dy[ABSOLUTE_POS] * (gauss(x) + x * density);
        } else {
            let one = Vector::<f32, N>::new(1.0);
            let open = sigmoid(gelu_inner(x) * Vector::new(2.0));
            let slope = (one + x * x * Vector::new(0.134145)) * Vector::new(1.595_769);
            dx[ABSOLUTE_POS] = dy[ABSOLUTE_POS] * (open + x * open * (one - open) * slope);
        }
    }
}

/// The normal distribution up to `x`: `(1 + erf(x / sqrt 2)) / 2`.
#[cube]
fn gauss<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    (Vector::new(1.0) + (x * Vector::new(0.707_106_77)).erf()) * Vector::new(0.5)
}

/// `sqrt(2 / pi) (x + 0.044715 x^3)`.
#[cube]
fn gelu_inner<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    (x + x * x * x * Vector::new(0.044715)) * Vector::new(0.797_884_6)
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0);
    one / (one + (Vector::new(0.0) - x).exp())
}

/// `x` rounded to bfloat16.
pub fn rounded<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let (y, client, lanes) = (empty_like(&x), x.client.clone(), vector(len(&x)));
    let (count, dim) = by_element(len(&x) / lanes);
    rounded_kernel::launch::<R>(&client, count, dim, lanes, x.into_array_arg(), y.clone().into_array_arg());
    y
}

#[cube(launch)]
fn rounded_kernel<N: Size>(x: &Array<Vector<f32, N>>, y: &mut Array<Vector<f32, N>>) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = Vector::cast_from(Vector::<bf16, N>::cast_from(x[ABSOLUTE_POS]));
    }
}

/// `x + y`, rounded to bfloat16.
pub fn rounded_sum<R: CubeRuntime>(x: CubeTensor<R>, y: CubeTensor<R>) -> CubeTensor<R> {
    let (sum, client, lanes) = (empty_like(&x), x.client.clone(), vector(len(&x)));
    let (count, dim) = by_element(len(&x) / lanes);
    rounded_sum_kernel::launch::<R>(
        &client,
        count,
        dim,
        lanes,
        x.into_array_arg(),
        y.into_array_arg(),
        sum.clone().into_array_arg(),
    );
    sum
}

#[cube(launch)]
fn rounded_sum_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    y: &Array<Vector<f32, N>>,
    sum: &mut Array<Vector<f32, N>>,
) {
    if ABSOLUTE_POS < sum.len() {
        let exact = x[ABSOLUTE_POS] + y[ABSOLUTE_POS];
        sum[ABSOLUTE_POS] = Vector::cast_from(Vector::<bf16, N>::cast_from(exact));
    }
}

/// What a product `[n, o]` becomes before it is read; nothing else, unless said.
pub struct Finish<R: CubeRuntime> {
    /// A bias `[o]`.
    pub bias_o: Option<CubeTensor<R>>,
    /// Something of its shape that is added.
    pub more_no: Option<CubeTensor<R>>,
    /// Whether the sum is rounded to bfloat16.
    pub rounded: bool,
}

impl<R: CubeRuntime> Default for Finish<R> {
    fn default() -> Self {
        Self { bias_o: None, more_no: None, rounded: false }
    }
}

impl<R: CubeRuntime> Finish<R> {
    /// Whether it leaves a product as it is.
    pub fn is_nothing(&self) -> bool {
        self.bias_o.is_none() && self.more_no.is_none() && !self.rounded
    }
}

/// A product `[n, o]` that has no other owner, finished in place.
pub fn finished<R: CubeRuntime>(y_no: CubeTensor<R>, finish: Finish<R>) -> CubeTensor<R> {
    if finish.is_nothing() {
        return y_no;
    }
    match y_no.dtype {
        DType::F32 => launch_finish::<R, f32>(y_no, finish),
        DType::F16 => launch_finish::<R, f16>(y_no, finish),
        _ => launch_finish::<R, bf16>(y_no, finish),
    }
}

fn launch_finish<R: CubeRuntime, Y: CubeElement + Float>(
    y_no: CubeTensor<R>,
    finish: Finish<R>,
) -> CubeTensor<R> {
    let (o, client) = (width(&y_no), y_no.client.clone());
    let Finish { bias_o, more_no, rounded } = finish;
    let lanes = vector(o);
    let (count, dim) = by_element(len(&y_no) / lanes);
    let (biased, summed) = (bias_o.is_some(), more_no.is_some());
    // What is absent is never read, but has to be something of its type.
    let there = bias_o.clone().or_else(|| more_no.clone()).unwrap_or_else(|| y_no.clone());
    let absent = || there.clone();
    finished_kernel::launch::<Y, R>(
        &client,
        count,
        dim,
        lanes,
        y_no.clone().into_array_arg(),
        bias_o.unwrap_or_else(absent).into_array_arg(),
        more_no.unwrap_or_else(absent).into_array_arg(),
        (o / lanes) as u32,
        biased,
        summed,
        rounded,
    );
    y_no
}

#[cube(launch)]
fn finished_kernel<N: Size, Y: Float>(
    y: &mut Array<Vector<Y, N>>,
    bias: &Array<Vector<f32, N>>,
    more: &Array<Vector<f32, N>>,
    vectors: u32,
    #[comptime] biased: bool,
    #[comptime] summed: bool,
    #[comptime] rounded: bool,
) {
    if ABSOLUTE_POS < y.len() {
        let mut value = Vector::<f32, N>::cast_from(y[ABSOLUTE_POS]);
        if biased {
            value += bias[ABSOLUTE_POS % vectors as usize];
        }
        if summed {
            value += more[ABSOLUTE_POS];
        }
        if rounded {
            value = Vector::cast_from(Vector::<bf16, N>::cast_from(value));
        }
        y[ABSOLUTE_POS] = Vector::cast_from(value);
    }
}
