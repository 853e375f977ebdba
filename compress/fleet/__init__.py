"""From here to the devices: `python -m compress deploy`, `rollback` and `results`.

A deployment is one process of ssh for each device, and one connection: `remote` starts it and sends `deploy.contract.agent`,
which works in the device's folder (`deploy.contract.releases`) as long as the connection lasts. `release` is the order of
the steps, `fleet` many devices at a time, `log` who deployed what where, `results` what devices have measured.
"""
