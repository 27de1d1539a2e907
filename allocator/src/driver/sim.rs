use super::*;
use crate::Error;
fn no<T>() -> Result<T> {
    Err(Error::unsupported("placeholder"))
}
/// Placeholder.
#[derive(Debug)]
pub struct SimDriver;
impl MemoryDriver for SimDriver {
    fn name(&self) -> &'static str {
        "x"
    }
    fn device(&self) -> DeviceIdentity {
        DeviceIdentity { kind: String::new(), name: String::new(), uuid: String::new() }
    }
    fn granularity(&self) -> u64 {
        1 << 21
    }
    fn transport(&self) -> Transport {
        Transport::Derived
    }
    fn host_accessible(&self) -> bool {
        false
    }
    fn reserve(&self, _bytes: u64, _align: u64) -> Result<Reservation> {
        no()
    }
    fn unreserve(&self, _r: Reservation) -> Result<()> {
        no()
    }
    fn create(&self, _bytes: u64) -> Result<Physical> {
        no()
    }
    fn export(&self, _p: &Physical) -> Result<Exported> {
        no()
    }
    fn import(&self, _e: Exported, _b: u64) -> Result<Physical> {
        no()
    }
    fn map(&self, _r: &Reservation, _o: u64, _p: &Physical) -> Result<()> {
        no()
    }
    fn unmap(&self, _r: &Reservation, _o: u64, _b: u64) -> Result<()> {
        no()
    }
    fn release(&self, _p: Physical) -> Result<()> {
        no()
    }
    fn record_event(&self, _s: Stream) -> Result<Event> {
        no()
    }
    fn wait_event(&self, _s: Stream, _e: &Event) -> Result<()> {
        no()
    }
    fn release_event(&self, _e: Event) {}
    fn synchronize(&self) -> Result<()> {
        no()
    }
}
impl SimDriver {
    /// x
    pub fn new(_s: u64) -> Self {
        Self
    }
}
