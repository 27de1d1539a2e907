//! TCP.
/// Placeholder.
#[derive(Debug)]
pub struct TcpStore;
/// Placeholder.
#[derive(Debug)]
pub struct TcpServer;
