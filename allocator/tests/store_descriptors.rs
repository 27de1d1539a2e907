//! Stores give back every descriptor. Alone in its process, so that nothing else opens any.

use std::time::Duration;

use symmpool_allocator::Deadline;
use symmpool_allocator::store::tcp::{Secret, TcpOptions};
use symmpool_allocator::store::{FileStore, Store, TcpServer, TcpStore};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn use_stores() {
    let ample = || Deadline::seconds(60);
    let options = TcpOptions { secret: Some(Secret::new("s").unwrap()), ..TcpOptions::default() };
    let server = TcpServer::bind("127.0.0.1:0", options.clone()).unwrap();
    let addr = server.local_addr();
    assert!(TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap_err().is_refused());
    let directory = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..8 {
            let (options, directory) = (options.clone(), directory.path());
            scope.spawn(move || {
                let tcp = TcpStore::connect_as(addr, options, rank, ample()).unwrap();
                tcp.all_gather("g", rank, 8, b"part", ample()).unwrap();
                let soon = Deadline::after(Duration::from_millis(20));
                assert!(tcp.get("never", soon).unwrap_err().is_timeout());
                let file = FileStore::open(directory).unwrap();
                file.all_gather("g", rank, 8, b"part", ample()).unwrap();
                file.add("n", 1, ample()).unwrap();
            });
        }
    });
    // The server goes before a client that is still open, and with connections it never admitted.
    let client = TcpStore::connect(addr, options, ample()).unwrap();
    let silent = std::net::TcpStream::connect(addr).unwrap();
    drop(server);
    drop((client, silent));
}

#[test]
fn every_descriptor_is_closed() {
    // Whatever is opened once for the process is open after this.
    use_stores();
    let before = open_descriptors();
    for _ in 0..3 {
        use_stores();
    }
    assert_eq!(open_descriptors(), before);
}
