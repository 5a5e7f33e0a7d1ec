//! The wire contract, generated from `proto/coxswain/v1/*.proto`; read those for the meaning of each call and
//! field.

#![allow(missing_docs, clippy::all)]

tonic::include_proto!("coxswain.v1");

/// Descriptors of both services, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/coxswain_v1.bin"));
