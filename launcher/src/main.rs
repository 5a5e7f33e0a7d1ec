//! `cox`
mod exit;
mod launch;
mod supervise;
fn main() {}
