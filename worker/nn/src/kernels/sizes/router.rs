//! Where operations and drops are told to a ledger.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Shape, TensorData};
use burn_backend::{
    DeviceId, DeviceOps, ExecutionError,
    backend::{DTypeUsage, DTypeUsageSet},
};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient, get_client};
use burn_std::future::DynFut;

use super::ledger::Ledger;

/// The backend.
pub type Sizes = burn_router::BackendRouter<Channel>;

/// What stands for a device: one ledger among several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizesDevice(pub(super) u16);

impl burn_backend::Device for SizesDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(0, self.0)
    }
}

impl DeviceOps for SizesDevice {}

/// A hand on a ledger.
#[derive(Clone, Debug)]
pub struct Client {
    device: SizesDevice,
    ledger: Arc<Mutex<Ledger>>,
}

impl Client {
    /// The client of a device.
    pub(super) fn for_device(device: SizesDevice) -> Self {
        get_client::<Channel>(&device)
    }

    /// What is written there.
    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunnerClient for Client {
    type Device = SizesDevice;

    fn register_op(&self, op: OperationIr) {
        self.ledger().run(&op);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        if tensor.status == TensorStatus::ReadWrite {
            self.ledger().release(tensor.id);
        }
        Box::pin(async move { Ok(TensorData::zeros::<f32, _>(tensor.shape)) })
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        self.ledger().name()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Client> {
        let id = self.create_empty_handle();
        self.ledger().allocate(&TensorIr::uninit(id, data.shape.clone(), data.dtype));
        RouterTensor::new(id, data.shape, data.dtype, self.clone())
    }

    fn device(&self) -> SizesDevice {
        self.device
    }

    fn seed(&self, _seed: u64) {}

    fn dtype_usage(&self, _dtype: DType) -> DTypeUsageSet {
        DTypeUsage::general()
    }
}

/// Leads to ledgers.
#[derive(Clone, Debug)]
pub struct Channel;

/// To nowhere else.
#[derive(Debug)]
pub struct Bridge;

impl MultiBackendBridge for Bridge {
    type TensorHandle = ();
    type Device = SizesDevice;

    fn change_backend_float((): (), _: Shape, _: &SizesDevice) {}

    fn change_backend_int((): (), _: Shape, _: &SizesDevice) {}

    fn change_backend_bool((): (), _: Shape, _: &SizesDevice) {}
}

impl RunnerChannel for Channel {
    type Device = SizesDevice;
    type Bridge = Bridge;
    type Client = Client;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_: &SizesDevice) -> String {
        "sizes".into()
    }

    fn init_client(device: &SizesDevice) -> Client {
        Client { device: *device, ledger: Arc::default() }
    }

    fn get_tensor_handle(_: &TensorIr, _: &Client) {}

    fn register_tensor(client: &Client, (): (), shape: Shape, dtype: DType) -> RouterTensor<Client> {
        let id = client.create_empty_handle();
        client.ledger().allocate(&TensorIr::uninit(id, shape.clone(), dtype));
        RouterTensor::new(id, shape, dtype, client.clone())
    }
}
