/// Placeholder.
#[derive(Debug)]
pub struct FileStore;
