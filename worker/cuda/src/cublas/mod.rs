//! cuBLASLt as the [`MatrixLibrary`] of burn's CUDA backend.
//!
//! ```text
//! library   the C interface, loaded at run time
//! shape     a product as the library describes it
//! here      who multiplies, and the order of products among burn's work
//! ```
//!
//! **Order.** A product is given to cubecl's own stream ([`streams`](crate::streams)) by the thread that
//! gives the driver everything else of cubecl's, in its turn: after what burn was told before, and before
//! what it is told next. The host does not wait.
//!
//! **The same bits.** The library's first choice for a shape is kept, and none is chosen that adds up parts
//! in the order in which they arrive: a shape gives the same bits in every step and every process with this
//! library and GPU.
//!
//! **What it does not take.** The first product of a shape is waited for until it is enqueued; one that the
//! library refuses is left to cubek's kernels, then and later. One that fails after that has no other who
//! could compute it any more: its result is filled with what is not a number, so that the step is left out.
//!
//! What it does not do: convert, or round sums once more; look at what was computed.

mod library;
mod shape;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use coxswain_nn::kernels::matrix_library::{self, MatrixLibrary, MatrixProduct, Multiplier};
use cubecl::{
    Runtime,
    cuda::CudaRuntime,
    device::DeviceId,
    device_handle::DeviceHandle,
    server::{Binding, ComputeServer},
    stream_id::StreamId,
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};

use self::{
    library::{CublasLt, Handle, Places, Plan},
    shape::{Shape, Side},
};
use crate::streams::{self, RuntimeStream};

/// Says who multiplies: `library`, `tuned` or `named`.
const VARIABLE: &str = "COX_MATMUL";
/// What algorithms may use beside the matrices, once a stream; `cox plan` knows of one.
const WORKSPACE: usize = coxswain_task::memory::PRODUCTS as usize;
/// Shapes that are remembered; then all are forgotten, and asked for again. The library answers alike.
const MOST: usize = 4096;

/// Runs on the thread that gives the driver cubecl's orders.
type Server = <CudaRuntime as Runtime>::Server;

/// Who multiplies, in a word, and which library, if it was asked for and is there.
static FOUND: OnceLock<(&'static str, Option<usize>)> = OnceLock::new();

/// Has products computed as the environment says, by the library unless it says otherwise. Before the first
/// product.
pub fn register() {
    FOUND.get_or_init(|| {
        let asked = std::env::var(VARIABLE).unwrap_or_default();
        let (word, multiplier) = match asked.as_str() {
            "" | "library" => ("library", Multiplier::Library),
            "tuned" => ("tuned", Multiplier::Tuned),
            "named" => ("named", Multiplier::Named),
            other => {
                tracing::warn!("{VARIABLE} is {other:?}: expected library, tuned or named; using library");
                ("library", Multiplier::Library)
            }
        };
        let opened = (multiplier == Multiplier::Library).then(open);
        let library = opened.and_then(|opened| {
            opened.inspect_err(|why| tracing::warn!("{why}; matmuls use slower kernels")).ok()
        });
        let version = library.map(CublasLt::version);
        let library = library.map(|library| Box::new(Products::new(library)) as Box<dyn MatrixLibrary>);
        matrix_library::choose(multiplier, library);
        (word, version)
    });
}

/// Who multiplies, in words.
pub fn told() -> String {
    match FOUND.get() {
        Some((_, Some(version))) => {
            format!("cuBLASLt {}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
        }
        Some(("named", None)) => "cubek's kernels, in a fixed order".to_owned(),
        _ => "cubek's kernels, autotuned".to_owned(),
    }
}

fn open() -> Result<&'static CublasLt, String> {
    streams::note().map_err(|why| format!("cuBLASLt is not used: {why}"))?;
    Ok(Box::leak(Box::new(CublasLt::open()?)))
}

/// The library on all GPUs of this process.
struct Products {
    gpus: Arc<Gpus>,
    known: Mutex<HashMap<DeviceId, GpuRecord>>,
}

/// One GPU's record: the thread that gives it orders, and whether the library takes a shape there.
struct GpuRecord {
    thread: DeviceHandle<Server>,
    shapes: HashMap<Shape, bool>,
}

/// What only threads that give orders use.
struct Gpus {
    library: &'static CublasLt,
    begun: Mutex<HashMap<DeviceId, GpuLibrary>>,
    /// Whether a product has failed that had been taken.
    failed: AtomicBool,
}

/// The library on one GPU.
struct GpuLibrary {
    handle: Handle,
    /// A stream of ours, for memory alone.
    memory: Arc<CudaStream>,
    /// Products of one stream follow each other, and share a workspace.
    workspaces: HashMap<StreamId, Workspace>,
    plans: HashMap<Shape, Plan>,
}

/// What algorithms may use in one stream.
struct Workspace {
    stream: RuntimeStream,
    address: u64,
    /// Held for its memory, which is at `address`.
    _memory: CudaSlice<u8>,
}

/// A product on its way to the thread that gives orders.
struct Order {
    gpus: Arc<Gpus>,
    device: DeviceId,
    shape: Shape,
    /// Memory of A, B and D.
    memory: [Binding; 3],
    /// Memory of a bias, and of what else is added.
    added: [Option<Binding>; 2],
    stream: StreamId,
}

impl Products {
    fn new(library: &'static CublasLt) -> Self {
        let gpus = Gpus { library, begun: Mutex::default(), failed: AtomicBool::new(false) };
        Self { gpus: Arc::new(gpus), known: Mutex::default() }
    }

    /// The thread of a GPU, and whether the library takes a shape there, if that is known.
    fn known(&self, device: DeviceId, shape: &Shape) -> (DeviceHandle<Server>, Option<bool>) {
        let mut known = lock(&self.known);
        let known = known
            .entry(device)
            .or_insert_with(|| GpuRecord { thread: DeviceHandle::new(device), shapes: HashMap::new() });
        (known.thread.clone(), known.shapes.get(shape).copied())
    }

    fn remember(&self, device: DeviceId, shape: Shape, takes: bool) {
        if let Some(GpuRecord { shapes, .. }) = lock(&self.known).get_mut(&device) {
            if shapes.len() >= MOST {
                shapes.clear();
            }
            shapes.insert(shape, takes);
        }
    }
}

impl MatrixLibrary for Products {
    fn multiply(&self, product: MatrixProduct) -> bool {
        let Some(shape) = Shape::of(&product) else { return false };
        let MatrixProduct { device, x, w, out, bias, more, .. } = product;
        let added = [bias, more].map(|added| added.map(|added| added.memory));
        let memory = [w.memory, x.memory, out.memory];
        let reaches = [&shape.a, &shape.b, &shape.d].map(Side::reach);
        let [bias, more] =
            added.each_ref().map(|added| added.as_ref().map_or(u64::MAX, Binding::size_in_used));
        let added_reach = [(bias, 4 * shape.d.sizes[0]), (more, shape.d.reach())];
        let held = memory.iter().map(Binding::size_in_used).zip(reaches).chain(added_reach);
        if held.into_iter().any(|(held, reach)| reach as u64 > held) {
            return false;
        }
        let (thread, takes) = self.known(device, &shape);
        let (gpus, stream) = (self.gpus.clone(), StreamId::current());
        let order = Order { gpus, device, shape, memory, added, stream };
        match takes {
            Some(true) => {
                thread.submit(move |server| order.carry_out_or_spoil(server));
                true
            }
            Some(false) => false,
            None => {
                let shape = order.shape.clone();
                // That the memory is not there is not the library's fault, and is told where it was refused.
                let Ok(outcome) = thread.submit_blocking(move |server| order.carry_out(server)) else {
                    return false;
                };
                if let Err(why) = &outcome {
                    tracing::warn!(%why, ?shape, "cuBLASLt does not support such matrices; using cubek's kernels");
                }
                self.remember(device, shape, outcome.is_ok());
                outcome.is_ok()
            }
        }
    }
}

impl Order {
    /// Gives the product to the GPU. An error: nothing was begun.
    fn carry_out(&self, server: &mut Server) -> Result<(), String> {
        let matrices = self.places(server);
        let [bias, more] = self.added.clone().map(|added| added.map(|memory| self.place(server, memory)));
        let mut begun = lock(&self.gpus.begun);
        let on_gpu = self.gpus.on(&mut begun, self.device)?;
        let &mut Workspace { stream, address: workspace, .. } = on_gpu.workspace(server, self.stream)?;
        let places = Places { matrices, bias, more, workspace, workspace_bytes: WORKSPACE };
        if !on_gpu.plans.contains_key(&self.shape) {
            let plan = on_gpu.handle.plan(&self.shape, &places).map_err(|why| why.to_string())?;
            if on_gpu.plans.len() >= MOST {
                on_gpu.plans.clear();
            }
            on_gpu.plans.insert(self.shape.clone(), plan);
        }
        let GpuLibrary { handle, plans, .. } = on_gpu;
        // The matrices reach no further than their memory (`multiply` above), which `self` holds until they
        // are ordered; nobody else is given the workspace, and products follow each other on one stream. What
        // burn is told later comes after this one, so its memory is given to nobody before.
        handle.multiply(&plans[&self.shape], &places, stream).map_err(|why| why.to_string())
    }

    /// Gives the product to the GPU where its shape was taken before: nobody hears of an error, so its result
    /// must not be used.
    fn carry_out_or_spoil(&self, server: &mut Server) {
        let Err(why) = self.carry_out(server) else { return };
        if !self.gpus.failed.swap(true, Ordering::Relaxed) {
            tracing::error!(%why, shape = ?self.shape, "cuBLASLt failed; the result of this matmul is NaN, and further failures are not logged");
        }
        let [.., result] = self.places(server);
        let begun = lock(&self.gpus.begun);
        let known = begun.get(&self.device).and_then(|on_gpu| on_gpu.workspaces.get(&self.stream));
        let Some(&Workspace { stream, .. }) = known else { return };
        // Nothing can be done about an error: the GPU is lost then, and its next answer says so.
        let _ = library::spoil(result, self.shape.d.reach(), stream);
    }

    /// Addresses of A, B and D. Panics, as cubecl's own launches do, where memory was refused.
    fn places(&self, server: &mut Server) -> [u64; 3] {
        self.memory.clone().map(|memory| self.place(server, memory))
    }

    /// The address of one matrix.
    fn place(&self, server: &mut Server, memory: Binding) -> u64 {
        let found = server.get_resource(memory, self.stream);
        found.expect("memory of a product is there unless it was refused").resource().ptr
    }
}

impl Gpus {
    /// The library on this GPU, begun when it is first needed; its context is current on this thread.
    fn on<'a>(
        &self,
        begun: &'a mut HashMap<DeviceId, GpuLibrary>,
        device: DeviceId,
    ) -> Result<&'a mut GpuLibrary, String> {
        match begun.entry(device) {
            Entry::Occupied(begun) => Ok(begun.into_mut()),
            Entry::Vacant(place) => {
                let cuda = |why| format!("CUDA: {why}");
                let context = CudaContext::new(usize::from(device.index_id)).map_err(cuda)?;
                let memory = context.new_stream().map_err(cuda)?;
                let handle = self.library.begin().map_err(|why| why.to_string())?;
                let (workspaces, plans) = Default::default();
                Ok(place.insert(GpuLibrary { handle, memory, workspaces, plans }))
            }
        }
    }
}

impl GpuLibrary {
    /// The workspace of what is ordered under `id`, and its stream.
    fn workspace(&mut self, server: &mut Server, id: StreamId) -> Result<&mut Workspace, String> {
        let cuda = |why| format!("CUDA: {why}");
        match self.workspaces.entry(id) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let stream = RuntimeStream::find(server, id);
                let stream =
                    stream.ok_or("cubecl's CUDA stream is unknown: cubecl loaded another libcuda")?;
                let memory = self.memory.alloc_zeros::<u8>(WORKSPACE).map_err(cuda)?;
                self.memory.synchronize().map_err(cuda)?;
                let address = memory.device_ptr(&self.memory).0;
                Ok(place.insert(Workspace { stream, address, _memory: memory }))
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
