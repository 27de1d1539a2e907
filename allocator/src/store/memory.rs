/// Placeholder.
#[derive(Debug)]
pub struct MemoryStore;
