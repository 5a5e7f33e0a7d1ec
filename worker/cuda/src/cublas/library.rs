//! cuBLASLt's C interface, and all `unsafe` of products.
//!
//! The library is opened as NCCL is, by its own names, and its few functions are taken from it here: cudarc's
//! safe wrapper knows no product of bfloat16 whose result is float32. Its types are opaque pointers, integers
//! and two structures of the header (cublasLt.h), the same since CUDA 11.
//!
//! What it does not do: decide what is multiplied, or when.

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use cudarc::driver::{DriverError, result};
use libloading::Library;

use super::shape::{Shape, Side};
use crate::{libraries, streams::RuntimeStream};

/// As the loader knows it; the last is there where developer files are.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// `cublasLtGetVersion` of CUDA 12.0.
const OLDEST: usize = 120_000;
/// `CUBLAS_COMPUTE_32F`, and with inputs of float32 rounded to tf32, `CUBLAS_COMPUTE_32F_FAST_TF32`.
const SUMS_IN_F32: c_int = 68;
const SUMS_IN_F32_OF_TF32: c_int = 77;
/// `CUDA_R_32F`
const F32: c_int = 0;
/// `CUBLASLT_MATMUL_DESC_TRANSA` and `_TRANSB`.
const TRANSPOSED: [c_int; 2] = [3, 4];
/// `CUBLASLT_MATMUL_DESC_EPILOGUE`, `_BIAS_POINTER` and `_BIAS_DATA_TYPE`.
const EPILOGUE: c_int = 7;
const BIAS: c_int = 8;
const BIAS_TYPE: c_int = 26;
/// `CUBLASLT_EPILOGUE_BIAS`: each row of `D` has its element of the bias added.
const ADDS_BIAS: c_int = 4;
/// `CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT` and `_STRIDED_BATCH_OFFSET`.
const BATCH_COUNT: c_int = 5;
const BATCH_OFFSET: c_int = 6;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`, `_REDUCTION_SCHEME_MASK` and `_MIN_ALIGNMENT_A_BYTES`, behind
/// which those of B, C and D are.
const WORKSPACE_BYTES: c_int = 1;
const REDUCTIONS: c_int = 3;
const ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];
/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE` and `_OUTPUT_TYPE`: what is split along the inner dimension is
/// added up from the workspace, in one order. The third scheme adds up in place, in the order in which parts
/// arrive.
const IN_ORDER: u32 = 2 | 4;

type Opaque = *mut c_void;

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, and what it takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    opaque: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($name:ident $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions in use.
        struct Functions {
            version: unsafe extern "C" fn() -> usize,
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Library) -> Option<Self> {
                // SAFETY: the types are those of cublasLt.h, unchanged since CUDA 11.
                Some(unsafe {
                    Self {
                        version: *library.get(b"cublasLtGetVersion").ok()?,
                        $($name: *library.get($symbol.as_bytes()).ok()?,)*
                    }
                })
            }
        }
    };
}

functions! {
    create "cublasLtCreate" (*mut Opaque);
    operation "cublasLtMatmulDescCreate" (*mut Opaque, c_int, c_int);
    set_operation "cublasLtMatmulDescSetAttribute" (Opaque, c_int, *const c_void, usize);
    end_operation "cublasLtMatmulDescDestroy" (Opaque);
    layout "cublasLtMatrixLayoutCreate" (*mut Opaque, c_int, u64, u64, i64);
    set_layout "cublasLtMatrixLayoutSetAttribute" (Opaque, c_int, *const c_void, usize);
    end_layout "cublasLtMatrixLayoutDestroy" (Opaque);
    preference "cublasLtMatmulPreferenceCreate" (*mut Opaque);
    set_preference "cublasLtMatmulPreferenceSetAttribute" (Opaque, c_int, *const c_void, usize);
    end_preference "cublasLtMatmulPreferenceDestroy" (Opaque);
    algorithms "cublasLtMatmulAlgoGetHeuristic"
        (Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Algorithm, *mut c_int);
    multiply "cublasLtMatmul"
        (Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque, *const c_void, *const c_void,
         Opaque, *mut c_void, Opaque, *const Algorithm, *mut c_void, usize, *mut c_void);
}

/// Why a product is not the library's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    call: &'static str,
    code: c_int,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let meaning = match self.code {
            0 => "no algorithm fits",
            1 => "not initialized",
            3 => "no memory",
            7 => "invalid value",
            8 => "not for this GPU",
            13 => "the kernel failed on the GPU",
            14 => "internal error",
            15 => "not supported",
            _ => "see cublasStatus_t in cublas_api.h",
        };
        write!(f, "{}: result {} ({meaning})", self.call, self.code)
    }
}

fn accepted(call: &'static str, code: c_int) -> Result<(), Refusal> {
    if code == 0 { Ok(()) } else { Err(Refusal { call, code }) }
}

/// The loaded library.
pub struct CublasLt {
    functions: Functions,
    version: usize,
}

impl CublasLt {
    /// Loads it; it stays loaded. An error is a sentence with a remedy.
    pub fn open() -> Result<Self, String> {
        let library = libraries::open(&NAMES).ok_or_else(|| {
            "no cuBLASLt (libcublasLt.so.13 or .12 cannot be loaded): install it (package libcublas, or nvidia-cublas of \
             PyPI) and put its directory into LD_LIBRARY_PATH"
                .to_owned()
        })?;
        // Never unloaded: its kernels may run until the process has ended.
        let library: &'static Library = Box::leak(Box::new(library));
        let too_old = |found: String| {
            format!("cuBLASLt is too old ({found}): version {OLDEST} (CUDA 12.0) or newer is needed")
        };
        let functions =
            Functions::load(library).ok_or_else(|| too_old("functions are missing".to_owned()))?;
        // SAFETY: the function takes nothing.
        let version = unsafe { (functions.version)() };
        if version < OLDEST {
            return Err(too_old(version.to_string()));
        }
        Ok(Self { functions, version })
    }

    /// `10000 * major + 100 * minor + patch`
    pub fn version(&self) -> usize {
        self.version
    }

    /// Begins on the GPU whose context is current.
    pub fn begin(&'static self) -> Result<Handle, Refusal> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer.
        accepted("cublasLtCreate", unsafe { (self.functions.create)(&raw mut handle) })?;
        Ok(Handle { library: self, handle })
    }
}

/// The library on one GPU. It stays until the process ends.
pub struct Handle {
    library: &'static CublasLt,
    handle: Opaque,
}

// SAFETY: cublasLt.h allows its handle to any thread, and keeps nothing of the thread that made it.
unsafe impl Send for Handle {}

/// How matrices of one shape are multiplied.
pub struct Plan {
    library: &'static CublasLt,
    operation: Opaque,
    /// Layouts of A, B and D; what is added lies as D does.
    layouts: [Opaque; 3],
    algorithm: Algorithm,
}

// SAFETY: descriptions are plain data behind pointers, and a plan is their only owner.
unsafe impl Send for Plan {}

/// Where the three matrices are, and the workspace.
pub struct Places {
    /// Addresses of A, B and D.
    pub matrices: [u64; 3],
    /// Address of what is added, if the shape says so.
    pub bias: Option<u64>,
    pub more: Option<u64>,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

impl Handle {
    /// The library's first choice for matrices of this shape with so much workspace. The same again for the
    /// same shape.
    pub fn plan(&self, shape: &Shape, places: &Places) -> Result<Plan, Refusal> {
        let f = &self.library.functions;
        let mut plan = Plan {
            library: self.library,
            operation: ptr::null_mut(),
            layouts: [ptr::null_mut(); 3],
            algorithm: Algorithm::default(),
        };
        let sums = if shape.rounds { SUMS_IN_F32_OF_TF32 } else { SUMS_IN_F32 };
        // SAFETY: every pointer is to a live value of the type that the header names for the attribute:
        // 4-byte integers for an operation's transposes, epilogue and type of the bias, a layout's count and
        // a preference's reductions and alignments, 8-byte ones for offsets and bytes. What is made is in
        // `plan`, which ends it whatever comes.
        unsafe {
            accepted("cublasLtMatmulDescCreate", (f.operation)(&raw mut plan.operation, sums, F32))?;
            for (side, attribute) in [&shape.a, &shape.b].into_iter().zip(TRANSPOSED) {
                let set = (f.set_operation)(plan.operation, attribute, at(&c_int::from(side.transposed)), 4);
                accepted("cublasLtMatmulDescSetAttribute", set)?;
            }
            if let Some(bias) = places.bias {
                for (attribute, value) in [(EPILOGUE, ADDS_BIAS), (BIAS_TYPE, F32)] {
                    let set = (f.set_operation)(plan.operation, attribute, at(&value), 4);
                    accepted("cublasLtMatmulDescSetAttribute", set)?;
                }
                plan.with_bias(bias)?;
            }
            for (side, layout) in [&shape.a, &shape.b, &shape.d].into_iter().zip(&mut plan.layouts) {
                describe(f, side, layout)?;
            }
            let mut preference = ptr::null_mut();
            accepted("cublasLtMatmulPreferenceCreate", (f.preference)(&raw mut preference))?;
            let chosen = self.choose(shape, &mut plan, preference, places.workspace_bytes);
            (f.end_preference)(preference);
            chosen?;
        }
        Ok(plan)
    }

    /// # Safety
    /// `preference` is alive, as all of `plan` is.
    unsafe fn choose(
        &self,
        shape: &Shape,
        plan: &mut Plan,
        preference: Opaque,
        workspace_bytes: usize,
    ) -> Result<(), Refusal> {
        let f = &self.library.functions;
        let [a, b, d] = plan.layouts;
        let aligned = [shape.a.aligned, shape.b.aligned, shape.d.aligned, shape.d.aligned];
        let mut found: c_int = 0;
        // SAFETY: see `Handle::plan`; room for one result, as many as are asked for.
        unsafe {
            let set = |attribute, value: *const c_void, bytes| {
                let code = (f.set_preference)(preference, attribute, value, bytes);
                accepted("cublasLtMatmulPreferenceSetAttribute", code)
            };
            set(WORKSPACE_BYTES, at(&(workspace_bytes as u64)), 8)?;
            set(REDUCTIONS, at(&IN_ORDER), 4)?;
            for (attribute, bytes) in ALIGNMENT.into_iter().zip(aligned) {
                set(attribute, at(&bytes), 4)?;
            }
            let code = (f.algorithms)(
                self.handle,
                plan.operation,
                a,
                b,
                d,
                d,
                preference,
                1,
                &raw mut plan.algorithm,
                &raw mut found,
            );
            accepted("cublasLtMatmulAlgoGetHeuristic", code)?;
        }
        if found < 1 || plan.algorithm.state != 0 || plan.algorithm.workspace_bytes > workspace_bytes {
            return Err(Refusal { call: "cublasLtMatmulAlgoGetHeuristic", code: plan.algorithm.state });
        }
        Ok(())
    }

    /// Enqueues a product on a stream of the context that is current. `plan` is of this GPU, and the caller
    /// keeps what is at `places`, matrices of the plan's shape and a workspace of its size, and lets nobody
    /// else write there, before the stream has passed the product.
    pub fn multiply(&self, plan: &Plan, places: &Places, stream: RuntimeStream) -> Result<(), Refusal> {
        let [a, b, d] = places.matrices;
        let [of_a, of_b, of_d] = plan.layouts;
        let (one, share) = (1.0_f32, if places.more.is_some() { 1.0_f32 } else { 0.0 });
        if let Some(bias) = places.bias {
            plan.with_bias(bias)?;
        }
        let input = |address: u64| address as *const c_void;
        // SAFETY: the caller's promise; both factors are read before the call returns. The algorithm is the
        // first field of what the library has filled.
        let code = unsafe {
            (self.library.functions.multiply)(
                self.handle,
                plan.operation,
                at(&one),
                input(a),
                of_a,
                input(b),
                of_b,
                at(&share),
                input(places.more.unwrap_or(d)),
                of_d,
                d as *mut c_void,
                of_d,
                &raw const plan.algorithm,
                places.workspace as *mut c_void,
                places.workspace_bytes,
                stream.as_ptr(),
            )
        };
        accepted("cublasLtMatmul", code)
    }
}

impl Plan {
    /// The next product adds what lies here.
    fn with_bias(&self, bias: u64) -> Result<(), Refusal> {
        // SAFETY: the operation is alive, and the attribute is a pointer of 8 bytes.
        let set = unsafe { (self.library.functions.set_operation)(self.operation, BIAS, at(&bias), 8) };
        accepted("cublasLtMatmulDescSetAttribute", set)
    }
}

/// A value as an attribute.
fn at<T>(value: &T) -> *const c_void {
    ptr::from_ref(value).cast()
}

/// Makes a layout.
///
/// # Safety
/// `f` are the library's functions.
unsafe fn describe(f: &Functions, side: &Side, layout: &mut Opaque) -> Result<(), Refusal> {
    let [rows, columns] = side.sizes.map(|size| size as u64);
    // SAFETY: see `Handle::plan`.
    unsafe {
        let made = (f.layout)(&raw mut *layout, side.number.code(), rows, columns, side.apart as i64);
        accepted("cublasLtMatrixLayoutCreate", made)?;
        let set = (f.set_layout)(*layout, BATCH_COUNT, at(&(side.count as c_int)), 4);
        accepted("cublasLtMatrixLayoutSetAttribute", set)?;
        let set = (f.set_layout)(*layout, BATCH_OFFSET, at(&(side.offset as i64)), 8);
        accepted("cublasLtMatrixLayoutSetAttribute", set)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let f = &self.library.functions;
        // SAFETY: what is not null is alive, and nobody has it after this.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                (f.end_layout)(layout);
            }
            if !self.operation.is_null() {
                (f.end_operation)(self.operation);
            }
        }
    }
}

/// Fills memory with what is not a number, in any of the types.
pub fn spoil(address: u64, bytes: usize, stream: RuntimeStream) -> Result<(), DriverError> {
    // SAFETY: the caller has the memory, which reaches so far, and the stream's context is current.
    unsafe { result::memset_d8_async(address, 0xff, bytes, stream.as_ptr().cast()) }
}
