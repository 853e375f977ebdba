"""Deployment to devices: `deploy`, `rollback`, `status` and `results`; and `trust`: what devices accept.

Each device is deployed to over one connection, by one process of ssh. `remote` starts it and sends
`deploy.contract.agent`, which works in the device's folder (`deploy.contract.releases`) until the connection closes.
`release` has the order of the steps, `rollout` deploys to many devices at once, `log` records who deployed what where,
and `results` collects what devices have measured. `repository` signs which bundles devices accept, with `key_files`;
the devices' rules are in `deploy.contract.trust`.
"""
